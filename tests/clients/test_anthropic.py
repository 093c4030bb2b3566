"""Anthropic's own client, unmodified and strict, at /v1/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import NamedTuple

import anthropic
import pytest
from support.api.api_server import TOKENIZER as BYTES
from support.api.api_server import Running, ending, running
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.api.thinking_caller import (
    ANSWER,
    CITIES,
    PARAMETERS,
    TEXT,
    THOUGHT,
    TOKENIZER,
    WEATHER,
    thinking_caller,
)

from chairlift.api.admission.keys import ApiKey, KeyLimits, digest_of

MODEL = "org/tiny"
KEY = "sk-alice-secret"
USER = {"role": "user", "content": "Hi"}
THINKING = {"type": "enabled", "budget_tokens": 2000}
BODY = {"model": MODEL, "max_tokens": 100, "messages": [USER]}


class Connected(NamedTuple):
    server: Running
    client: anthropic.AsyncAnthropic


@pytest.fixture
async def connected() -> AsyncIterator[Connected]:
    engine = FakeEngine(model_info(), ending("Hello"))
    keys = (ApiKey("alice", digest_of(KEY), KeyLimits(rpm=100)),)
    async with (
        running(engine, keys=keys) as server,
        anthropic.AsyncAnthropic(
            base_url=server.url, api_key=KEY, max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield Connected(server, client)


async def test_create(connected: Connected) -> None:
    reply = await connected.client.messages.create(**BODY, system="Be brief", stop_sequences=["lo"])
    assert reply.content[0].text == "Hel"
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "lo")
    assert (reply.model, reply.usage.cache_read_input_tokens) == (MODEL, 0)
    assert reply._request_id
    # The reply's content can be sent back unchanged.
    turns = [USER, {"role": "assistant", "content": reply.content}, USER]
    # Agents ask every model to think; this model cannot, and ignores it.
    body = {**BODY, "messages": turns, "thinking": THINKING}
    again = await connected.client.messages.create(**body)
    assert (again.content[0].text, again.stop_reason) == ("Hello", "end_turn")
    count = await connected.client.messages.count_tokens(model=MODEL, messages=turns)
    assert count.input_tokens == again.usage.input_tokens


async def test_stream(connected: Connected) -> None:
    async with connected.client.messages.stream(**BODY) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == list("Hello")
    assert (final.content[0].text, final.stop_reason) == ("Hello", "end_turn")
    assert final.usage.output_tokens == 6
    raw = await connected.client.messages.create(**BODY, stream=True)
    kinds = [event.type async for event in raw]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_errors_have_the_clients_own_types(connected: Connected) -> None:
    server, client = connected
    create = client.messages.create
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match="'image'") as bad:
        await create(**{**BODY, "messages": [{"role": "user", "content": [image]}]})
    assert (bad.value.type, bool(bad.value.request_id)) == ("invalid_request_error", True)
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**BODY)
    with pytest.raises(anthropic.NotFoundError):
        await create(**{**BODY, "model": "claude"})
    server.engine.script = lambda request, index: Scripted([1, 2], "error", error="it broke")
    with pytest.raises(anthropic.InternalServerError):
        await create(**BODY)
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        async with client.messages.stream(**BODY) as stream:
            await stream.get_final_message()
    server.service.drain.draining = True
    with pytest.raises(anthropic.ServiceUnavailableError):
        await create(**BODY)


async def test_an_output_schema_constrains_the_reply(connected: Connected) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    connected.server.engine.script = ending('{"a": 1}')
    reply = await connected.client.messages.create(
        **BODY, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(reply.content[0].text) == {"a": 1}
    grammar = connected.server.engine.submitted[0].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {**schema, "additionalProperties": False}


# Thoughts and calls

TOOL = {"name": WEATHER, "input_schema": PARAMETERS}


@pytest.fixture
async def calling() -> AsyncIterator[Connected]:
    async with (
        running(thinking_caller(), TOKENIZER) as server,
        anthropic.AsyncAnthropic(
            base_url=server.url, api_key="-", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield Connected(server, client)


async def test_thoughts_and_calls_can_be_sent_back(calling: Connected) -> None:
    server, client = calling
    body = {**BODY, "max_tokens": 1000, "tools": [TOOL], "thinking": THINKING}
    reply = await client.messages.create(**body)
    thought, text, *calls = reply.content
    assert (thought.thinking, text.text, reply.stop_reason) == (THOUGHT, TEXT, "tool_use")
    assert [(call.name, call.input) for call in calls] == [
        (WEATHER, {"city": city}) for city in CITIES
    ]
    thinking = server.engine.submitted[0].params.thinking
    assert thinking is not None
    assert thinking.budget == 2000
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "no idea"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    turns = [
        USER,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": results},
    ]
    answer = await client.messages.create(**{**body, "messages": turns})
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
    prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
    assert f"<think>{THOUGHT}</think>{TEXT}<tool_call>" in prompt
    roles = ("tool\nsunny", "tool\nError: no idea", "user\nWell?", "assistant\n")
    assert prompt.endswith("<|im_end|>\n".join(f"<|im_start|>{said}" for said in roles))


async def test_thoughts_and_calls_in_a_stream(calling: Connected) -> None:
    async with calling.client.messages.stream(**BODY, tools=[TOOL]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    plain = await calling.client.messages.create(**BODY, tools=[TOOL])
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    ids = {"id": True, "parsed_output": True}
    assert [block.model_dump(exclude=ids) for block in final.content] == [
        block.model_dump(exclude=ids) for block in plain.content
    ]
    assert final.stop_reason == "tool_use"
    kinds = [event.type for event in events]
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    bounds = [
        (event.type, event.index) for event in events if event.type.startswith("content_block_s")
    ]
    assert bounds == [
        (f"content_block_{end}", index) for index in range(4) for end in ("start", "stop")
    ]


async def test_tool_choice_and_thinking_are_respected(calling: Connected) -> None:
    server, client = calling
    chosen = {"type": "tool", "name": WEATHER, "disable_parallel_tool_use": True}
    for choice in (chosen, {"type": "any"}):
        reply = await client.messages.create(
            **BODY, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"}
        )
        assert reply.content
        submitted = server.engine.submitted[-1]
        assert submitted.params.grammar is not None
        assert TOKENIZER.decode(submitted.prompt).endswith("<think></think>")
    await client.messages.create(**BODY, tools=[TOOL], tool_choice={"type": "none"})
    assert WEATHER not in TOKENIZER.decode(server.engine.submitted[-1].prompt)


async def test_a_tool_runner_goes_on_without_a_thread(calling: Connected) -> None:
    client = calling.client
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    for stream in (False, True):
        runner = client.beta.messages.tool_runner(**BODY, tools=[get_weather], stream=stream)
        final = await runner.until_done()
        assert final.content[-1].text == ANSWER
    assert asked == [*CITIES, *CITIES]
    with pytest.raises(anthropic.BadRequestError, match="thread"):
        await client.beta.messages.thread(**BODY).send()


async def test_a_reply_continues_a_prefilled_assistant_message(connected: Connected) -> None:
    prefilled = [USER, {"role": "assistant", "content": "Well, "}]
    await connected.client.messages.create(**{**BODY, "messages": prefilled})
    prompt = BYTES.decode(connected.server.engine.submitted[-1].prompt)
    assert prompt.endswith("<|im_start|>assistant\nWell, ")
