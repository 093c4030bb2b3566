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
ASKED = {"model": MODEL, "max_tokens": 100, "messages": [USER]}


class Talking(NamedTuple):
    server: Running
    client: anthropic.AsyncAnthropic


@pytest.fixture
async def talking() -> AsyncIterator[Talking]:
    engine = FakeEngine(model_info(), ending("Hello"))
    keys = (ApiKey("alice", digest_of(KEY), KeyLimits(rpm=100)),)
    async with (
        running(engine, keys=keys) as server,
        anthropic.AsyncAnthropic(
            base_url=server.url, api_key=KEY, max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield Talking(server, client)


async def test_create(talking: Talking) -> None:
    reply = await talking.client.messages.create(**ASKED, system="Be brief", stop_sequences=["lo"])
    assert reply.content[0].text == "Hel"
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "lo")
    assert (reply.model, reply.usage.cache_read_input_tokens) == (MODEL, 0)
    assert reply._request_id
    # What came out goes in, as it is.
    turns = [USER, {"role": "assistant", "content": reply.content}, USER]
    # Agents ask every model to think, and this one cannot.
    asked = {**ASKED, "messages": turns, "thinking": THINKING}
    again = await talking.client.messages.create(**asked)
    assert (again.content[0].text, again.stop_reason) == ("Hello", "end_turn")
    count = await talking.client.messages.count_tokens(model=MODEL, messages=turns)
    assert count.input_tokens == again.usage.input_tokens


async def test_stream(talking: Talking) -> None:
    async with talking.client.messages.stream(**ASKED) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == list("Hello")
    assert (final.content[0].text, final.stop_reason) == ("Hello", "end_turn")
    assert final.usage.output_tokens == 6
    raw = await talking.client.messages.create(**ASKED, stream=True)
    kinds = [event.type async for event in raw]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_errors_are_its_own(talking: Talking) -> None:
    server, client = talking
    create = client.messages.create
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match="'image'") as bad:
        await create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
    assert (bad.value.type, bool(bad.value.request_id)) == ("invalid_request_error", True)
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError):
        await create(**{**ASKED, "model": "claude"})
    server.engine.script = lambda request, index: Scripted([1, 2], "error", error="it broke")
    with pytest.raises(anthropic.InternalServerError):
        await create(**ASKED)
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()
    server.service.drain.draining = True
    with pytest.raises(anthropic.ServiceUnavailableError):
        await create(**ASKED)


async def test_the_schema_of_an_output_is_held_to(talking: Talking) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    talking.server.engine.script = ending('{"a": 1}')
    reply = await talking.client.messages.create(
        **ASKED, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(reply.content[0].text) == {"a": 1}
    grammar = talking.server.engine.submitted[0].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {**schema, "additionalProperties": False}


# Thoughts and calls

TOOL = {"name": WEATHER, "input_schema": PARAMETERS}


@pytest.fixture
async def calling() -> AsyncIterator[Talking]:
    async with (
        running(thinking_caller(), TOKENIZER) as server,
        anthropic.AsyncAnthropic(
            base_url=server.url, api_key="-", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield Talking(server, client)


async def test_thoughts_and_calls_go_round(calling: Talking) -> None:
    server, client = calling
    asked = {**ASKED, "max_tokens": 1000, "tools": [TOOL], "thinking": THINKING}
    reply = await client.messages.create(**asked)
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
    answer = await client.messages.create(**{**asked, "messages": turns})
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
    prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
    assert f"<think>{THOUGHT}</think>{TEXT}<tool_call>" in prompt
    roles = ("tool\nsunny", "tool\nError: no idea", "user\nWell?", "assistant\n")
    assert prompt.endswith("<|im_end|>\n".join(f"<|im_start|>{said}" for said in roles))


async def test_thoughts_and_calls_in_a_stream(calling: Talking) -> None:
    async with calling.client.messages.stream(**ASKED, tools=[TOOL]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    whole = await calling.client.messages.create(**ASKED, tools=[TOOL])
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    ids = {"id": True, "parsed_output": True}
    assert [block.model_dump(exclude=ids) for block in final.content] == [
        block.model_dump(exclude=ids) for block in whole.content
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


async def test_which_tool_and_whether_to_think_are_chosen(calling: Talking) -> None:
    server, client = calling
    chosen = {"type": "tool", "name": WEATHER, "disable_parallel_tool_use": True}
    for choice in (chosen, {"type": "any"}):
        reply = await client.messages.create(
            **ASKED, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"}
        )
        assert reply.content
        submitted = server.engine.submitted[-1]
        assert submitted.params.grammar is not None
        assert TOKENIZER.decode(submitted.prompt).endswith("<think></think>")
    await client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "none"})
    assert WEATHER not in TOKENIZER.decode(server.engine.submitted[-1].prompt)


async def test_a_reply_goes_on_from_what_is_put_in_its_mouth(talking: Talking) -> None:
    begun = [USER, {"role": "assistant", "content": "Well, "}]
    await talking.client.messages.create(**{**ASKED, "messages": begun})
    prompt = BYTES.decode(talking.server.engine.submitted[-1].prompt)
    assert prompt.endswith("<|im_start|>assistant\nWell, ")
