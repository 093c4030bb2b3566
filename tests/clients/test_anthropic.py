"""Anthropic's own client, unmodified and strict, at /v1/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import NamedTuple

import anthropic
import pytest
from api_server import Running, ending, running
from fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.keys import ApiKey, KeyLimits, digest_of

MODEL = "org/tiny"
KEY = "sk-alice-secret"
USER = {"role": "user", "content": "Hi"}
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
    again = await talking.client.messages.create(**{**ASKED, "messages": turns})
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
    assert json.loads(grammar.text) == schema
