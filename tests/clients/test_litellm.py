"""LiteLLM, unmodified: a tool call, plain and streamed, and its answer."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI
from support.api.server import Server
from support.api.weather_question import MODEL, QUESTION, TOOL, WEATHER

pytestmark = [
    pytest.mark.system,
    # LiteLLM uses pydantic in ways that pydantic warns about.
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.*fields' attr:DeprecationWarning"),
]

ASK: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 60,
    "seed": 7,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def litellm() -> Any:
    """The package. Its import takes seconds, which processes that only collect tests save."""
    # Otherwise the import downloads prices.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return importlib.import_module("litellm")


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    """The client that LiteLLM uses; it would leave one of its own open."""
    async with AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        yield client


async def test_a_call_and_its_answer(litellm: Any, client: AsyncOpenAI) -> None:
    reply = await litellm.acompletion(**ASK, client=client)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK["messages"], choice.message.model_dump(), result]
    answered = {**ASK, "messages": messages, "tool_choice": "none", "max_tokens": 8}
    reply = await litellm.acompletion(**answered, client=client)
    assert reply.choices[0].message.content


async def test_a_structured_reply_over_ollamas_api(litellm: Any, server: Server) -> None:
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    reply = await litellm.acompletion(
        model=f"ollama_chat/{MODEL}",
        api_base=server.url,
        messages=ASK["messages"],
        max_tokens=500,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    jsonschema.validate(json.loads(reply.choices[0].message.content), WEATHER)


async def test_a_streamed_call(litellm: Any, client: AsyncOpenAI) -> None:
    stream = await litellm.acompletion(**ASK, client=client, stream=True)
    chunks = [chunk async for chunk in stream]
    reply = litellm.stream_chunk_builder(chunks)
    (call,) = reply.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert reply.choices[0].finish_reason == "tool_calls"
