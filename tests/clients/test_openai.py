"""OpenAI's own client, unmodified and strict: chat, and tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any, Literal

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError, pydantic_function_tool
from pydantic import BaseModel, Field
from support.api.weather_question import MODEL, QUESTION, TOOL, WEATHER

pytestmark = pytest.mark.system

BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 64,
    "seed": 7,
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "The time now."},
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=base_url, api_key="-", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def check_weather(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arguments)
    jsonschema.validate(found, WEATHER)
    return found


async def test_a_named_function_is_called(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        **BODY,
        tools=[CLOCK, TOOL],
        tool_choice=NAMED,
        temperature=1,
        parallel_tool_calls=False,
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)


async def test_a_required_call_streams_and_its_result_comes_back(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        **BODY, tools=[TOOL], tool_choice="required", temperature=1, parallel_tool_calls=False
    ) as stream:
        deltas = [
            event.arguments_delta
            async for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    found = check_weather(call.function.arguments)
    assert "".join(deltas) == call.function.arguments
    assert len(deltas) > 3
    messages: list[Any] = [
        *BODY["messages"],
        message.model_dump(exclude={"parsed"}, exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": f"{found['city']}: sunny"},
    ]
    reply = await client.chat.completions.create(
        **{**BODY, "messages": messages, "max_tokens": 16}, tools=[TOOL], tool_choice="none"
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].message.tool_calls is None


async def test_with_tool_choice_auto_the_model_calls_or_replies(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(**BODY, tools=[TOOL], temperature=0)
    for choice in reply.choices:
        for call in choice.message.tool_calls or ():
            check_weather(call.function.arguments)
        assert choice.message.tool_calls or choice.message.content
        called = choice.finish_reason == "tool_calls"
        assert choice.finish_reason == "length" or called == bool(choice.message.tool_calls)


class Sky(StrEnum):
    CLEAR = "clear"
    CLOUDY = "cloudy"


class Report(BaseModel):
    """What the weather is like."""

    city: Literal["Zürich", "Basel"]
    sky: Sky
    degrees: int = Field(ge=-40, le=50)


async def test_arguments_are_parsed(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.parse(
        **BODY,
        tools=[pydantic_function_tool(Report)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
    )
    assert reply.choices[0].message.tool_calls is not None
    (call,) = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Report)


async def test_a_chat_stream_with_usage_logprobs_and_choices(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        **{**BODY, "max_tokens": 5},
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        n=2,
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    part: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    with_image: list[Any] = [{"role": "user", "content": [part]}]
    with pytest.raises(BadRequestError, match="image_url"):
        await client.chat.completions.create(model=MODEL, messages=with_image)
