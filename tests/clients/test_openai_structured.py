"""Structured output through the official client, from the default model."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from support.api.server import GREEDY, SAMPLED, Server

from chairlift.loadtest.schemas import try_schemas

pytestmark = pytest.mark.system


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as client:
        yield client


class Peak(BaseModel):
    name: Annotated[str, Field(max_length=30)]
    metres: Annotated[int, Field(ge=0, le=9000)]
    rock: Literal["granite", "limestone"] | None


class Range(BaseModel):
    country: Annotated[str, Field(max_length=30)]
    peaks: Annotated[list[Peak], Field(min_length=1, max_length=2)]


ALPS: Any = [{"role": "user", "content": "Name a mountain range and some of its peaks."}]


async def test_parse_returns_the_requested_model(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.parse(
        messages=ALPS, response_format=Range, max_tokens=400, **GREEDY
    )
    (choice,) = reply.choices
    assert isinstance(choice.message.parsed, Range)
    assert choice.finish_reason == "stop"


async def test_a_stream_is_parsed_too(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        messages=ALPS, response_format=Range, **{**SAMPLED, "max_tokens": 400}, seed=5
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Range)


async def test_the_fields_of_vllms_examples_work(client: AsyncOpenAI) -> None:
    async def reply_to(**extra: Any) -> str:
        reply = await client.chat.completions.create(
            messages=ALPS, **{**SAMPLED, "max_tokens": 60}, extra_body=extra
        )
        return str(reply.choices[0].message.content)

    assert await reply_to(structured_outputs={"choice": ["Alps", "Andes"]}) in ("Alps", "Andes")
    assert re.fullmatch(
        "[a-z]{3,9}@[a-z]{2,9}", await reply_to(guided_regex="[a-z]{3,9}@[a-z]{2,9}")
    )
    grammar = 'root ::= "SELECT " col " from " col\ncol ::= "a" | "b"'
    assert re.fullmatch("SELECT [ab] from [ab]", await reply_to(guided_grammar=grammar))


async def test_a_json_object_reply_is_an_object(client: AsyncOpenAI) -> None:
    ask: Any = [{"role": "user", "content": 'Reply with {"sea": "blue"} and nothing else.'}]
    reply = await client.chat.completions.create(
        messages=ask, response_format={"type": "json_object"}, max_tokens=300, **GREEDY
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(str(reply.choices[0].message.content)), dict)
    assert str(reply.choices[0].message.content).startswith("{")


async def test_an_unsupported_schema_is_a_bad_request(client: AsyncOpenAI) -> None:
    schema = {"type": "object", "dependentRequired": {"a": ["b"]}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="dependentRequired") as caught:
        await client.chat.completions.create(messages=ALPS, response_format=form, **GREEDY)
    assert caught.value.param == "response_format"


async def test_replies_to_random_schemas_are_valid(server: Server) -> None:
    report = await try_schemas(server.url, 20, 16, seed=1, shown=False)
    assert report.passed, report.failures
