"""LangChain's client for OpenAI, unmodified: tools bound, called, answered; streams."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import pytest
from support.api.weather_question import MODEL, QUESTION

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def messages() -> Any:
    """LangChain's messages. Their import takes seconds, which processes that only collect save."""
    return importlib.import_module("langchain_core.messages")


@pytest.fixture(scope="module")
def get_weather() -> Any:
    def get_weather(city: Literal["Zürich", "Basel"], days: int) -> str:
        """The weather in a city for some days."""
        return f"{city}: sunny for {days} days"

    return importlib.import_module("langchain_core.tools").tool(get_weather)


@pytest.fixture
async def model(base_url: str) -> AsyncIterator[Any]:
    # LangChain would leave connections of its own open.
    async with httpx.AsyncClient() as connections:
        yield importlib.import_module("langchain_openai").ChatOpenAI(
            model=MODEL,
            base_url=base_url,
            api_key="-",
            temperature=1,
            seed=7,
            max_completion_tokens=60,
            stream_usage=True,
            http_async_client=connections,
        )


async def test_bound_tools_are_called_and_their_results_answered(
    model: Any, messages: Any, get_weather: Any
) -> None:
    bound = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    question = messages.HumanMessage(QUESTION)
    called = await bound.ainvoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "get_weather"
    assert called.invalid_tool_calls == []
    result = await get_weather.ainvoke(call)
    assert isinstance(result, messages.ToolMessage)
    answer = await model.ainvoke([question, called, result], max_completion_tokens=8)
    assert isinstance(answer.content, str)
    assert answer.content
    assert answer.tool_calls == []


async def test_streamed_calls_add_up(model: Any, messages: Any, get_weather: Any) -> None:
    bound = model.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    total: Any = None
    pieces = 0
    async for chunk in bound.astream(QUESTION):
        assert isinstance(chunk, messages.AIMessageChunk)
        pieces += bool(chunk.tool_call_chunks)
        total = chunk if total is None else total + chunk
    assert total is not None
    assert pieces > 3
    (call,) = total.tool_calls
    assert call["args"]["city"] in ("Zürich", "Basel")
    assert isinstance(call["args"]["days"], int)
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] > 0
