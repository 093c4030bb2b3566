"""OpenAI's Agents SDK, unmodified: both of its models run an agent with a tool."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from support.api.server import Server
from support.api.weather_question import MODEL, QUESTION

pytestmark = pytest.mark.system

MODELS = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    country: Literal["Switzerland", "France"]


@pytest.fixture(scope="module")
def sdk() -> Iterator[Any]:
    """The package. Its import takes seconds, which processes that only collect tests save."""
    agents = importlib.import_module("agents")
    # It would send traces to OpenAI.
    agents.set_tracing_disabled(True)
    yield agents
    agents.set_tracing_disabled(False)


@pytest.fixture
async def model(request: pytest.FixtureRequest, sdk: Any, server: Server) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield getattr(sdk, request.param)(MODEL, client)


def make_agent(sdk: Any, model: Any, asked: list[tuple[str, int]]) -> Any:
    """An agent that has to call its tool; ``asked`` gets the tool's arguments.

    Its model writes at random: only the first turn has the tool, and the final output is a place,
    which ends.
    """

    def get_weather(city: Literal["Zürich", "Basel"], days: int) -> str:
        """The weather in a city for some days."""
        asked.append((city, days))
        return f"{city}: sunny for {days} days"

    tool = sdk.function_tool(get_weather, is_enabled=lambda context, agent: not asked)
    return sdk.Agent(
        name="Weather",
        instructions="Be brief.",
        tools=[tool],
        output_type=Place,
        model=model,
        model_settings=sdk.ModelSettings(
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            temperature=0,
            include_usage=True,
        ),
    )


def check_run(run: Any, asked: list[tuple[str, int]]) -> None:
    """One call of the tool, its result, and a reply."""
    assert [item.type for item in run.new_items] == [
        *("tool_call_item", "tool_call_output_item", "message_output_item")
    ]
    ((city, days),) = asked
    assert run.new_items[1].output == f"{city}: sunny for {days} days"
    assert isinstance(run.final_output, Place)
    usage = run.context_wrapper.usage
    assert usage.requests == 2
    assert min(usage.input_tokens, usage.output_tokens) > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("model", MODELS, indirect=True)
async def test_a_tool_is_called_and_its_result_answered(sdk: Any, model: Any) -> None:
    asked: list[tuple[str, int]] = []
    run = await sdk.Runner.run(make_agent(sdk, model, asked), QUESTION, max_turns=2)
    check_run(run, asked)
    # The conversation goes on from the items that the SDK sends back.
    items = [*run.to_input_list(), {"role": "user", "content": "And in Basel?"}]
    asked.clear()
    check_run(await sdk.Runner.run(make_agent(sdk, model, asked), items, max_turns=2), asked)


@pytest.mark.parametrize("model", MODELS, indirect=True)
async def test_a_run_streams(sdk: Any, model: Any) -> None:
    asked: list[tuple[str, int]] = []
    run = sdk.Runner.run_streamed(make_agent(sdk, model, asked), QUESTION, max_turns=2)
    events = [event async for event in run.stream_events()]
    check_run(run, asked)
    assert [event.name for event in events if event.type == "run_item_stream_event"] == [
        *("tool_called", "tool_output", "message_output_created")
    ]
    raw = [event.data for event in events if event.type == "raw_response_event"]
    pieces = {
        kind: [event.delta for event in raw if event.type == kind]
        for kind in ("response.function_call_arguments.delta", "response.output_text.delta")
    }
    assert all(len(deltas) > 3 for deltas in pieces.values())
    text = "".join(pieces["response.output_text.delta"])
    assert Place.model_validate_json(text) == run.final_output
