"""pydantic-ai, unmodified: both of its models for OpenAI run an agent with a tool."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from support.api.server import Server
from support.api.weather_question import MODEL, QUESTION

pytestmark = pytest.mark.system

MODELS = ("OpenAIChatModel", "OpenAIResponsesModel")
OUTPUTS = ("ToolOutput", "NativeOutput")


class Place(BaseModel):
    country: Literal["Switzerland", "France"]
    # Last, so that a stream has many states that are valid so far.
    name: str = Field(max_length=30)


@pytest.fixture(scope="module")
def sdk() -> Any:
    """The package. Its import takes seconds, which processes that only collect tests save."""
    return importlib.import_module("pydantic_ai")


@pytest.fixture
async def model(request: pytest.FixtureRequest, sdk: Any, server: Server) -> AsyncIterator[Any]:
    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")
    async with server.client() as client:
        provider = providers.OpenAIProvider(openai_client=client)
        yield getattr(models, request.param)(MODEL, provider=provider)


def make_agent(sdk: Any, model: Any, output: str, asked: list[str]) -> Any:
    """An agent that calls its tool in the first step and ends in the second.

    The model writes at random, so the settings of each step choose for it.
    """
    capabilities = importlib.import_module("pydantic_ai.capabilities")

    class FirstTheTool(capabilities.AbstractCapability):  # type: ignore[misc, name-defined]
        def get_model_settings(self) -> Any:
            return lambda step: {"tool_choice": ["get_weather"] if step.run_step == 1 else "none"}

    agent = sdk.Agent(
        model,
        instructions="Be brief.",
        output_type=getattr(sdk, output)(Place),
        capabilities=[FirstTheTool()],
        model_settings={"max_tokens": 1500, "parallel_tool_calls": False, "temperature": 0},
    )

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: Literal["Zürich", "Basel"], days: int) -> str:
        """The weather in a city for some days."""
        asked.append(city)
        return f"{city}: sunny for {days} days"

    return agent


def check_messages(messages: list[Any], asked: list[str]) -> None:
    """One call of the tool, and its result."""
    (city,) = asked
    parts = [part for message in messages for part in message.parts]
    call, result = [part for part in parts if getattr(part, "tool_name", "") == "get_weather"]
    assert (call.part_kind, result.part_kind) == ("tool-call", "tool-return")
    assert call.tool_call_id == result.tool_call_id
    assert result.content.startswith(f"{city}: sunny")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("model", MODELS, indirect=True)
async def test_a_tool_is_called_and_the_output_has_its_type(
    sdk: Any, model: Any, output: str
) -> None:
    asked: list[str] = []
    agent = make_agent(sdk, model, output, asked)
    run = await agent.run(QUESTION)
    assert isinstance(run.output, Place)
    check_messages(run.all_messages(), asked)
    assert run.usage.requests == 2
    assert min(run.usage.input_tokens, run.usage.output_tokens) > 0
    # The conversation goes on from the messages that the SDK sends back.
    asked.clear()
    again = await agent.run("And in Basel?", message_history=run.all_messages())
    assert isinstance(again.output, Place)
    check_messages(again.new_messages(), asked)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("model", MODELS, indirect=True)
async def test_a_run_streams(sdk: Any, model: Any, output: str) -> None:
    asked: list[str] = []
    async with make_agent(sdk, model, output, asked).run_stream(QUESTION) as stream:
        outputs = [part async for part in stream.stream_output(debounce_by=None)]
        check_messages(stream.all_messages(), asked)
    assert len(outputs) > 3
    assert isinstance(outputs[-1], Place)


@pytest.mark.parametrize("model", MODELS, indirect=True)
async def test_text_streams(sdk: Any, model: Any) -> None:
    agent = sdk.Agent(model, model_settings={"max_tokens": 40})
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 3
    assert stream.usage.output_tokens == 40
