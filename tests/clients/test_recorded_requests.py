"""Recorded requests: guidellm, guidance and outlines, which are not installed, and instructor.

The fields are those that the clients sent; prompts and schemas are our own.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import jsonschema
import pytest
from support.api.weather_question import MODEL

pytestmark = pytest.mark.system

BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Ada is 36 years old and lives in London."}],
    "temperature": 0,
}


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url + "/") as http:
        yield http


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
        return reply


async def chat(http: aiohttp.ClientSession, **fields: Any) -> tuple[str, str]:
    """The reply's text and finish reason."""
    reply = await post(http, "chat/completions", {**BODY, **fields})
    (choice,) = reply["choices"]
    return choice["message"]["content"], choice["finish_reason"]


# guidellm

STREAMED = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}
# So many that they do not fit in two chunks, even if the server falls behind.
TOKENS = 640
GUIDELLM_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "One, two,", "max_tokens": TOKENS}),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Count."}]}],
            "max_completion_tokens": TOKENS,
        },
    ),
]


@pytest.fixture(scope="module")
def guidellm_streams(base_url: str) -> list[str]:
    """The streams of all requests, which one batch computes."""

    async def stream(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> str:
        async with http.post(path, json={**STREAMED, **body}) as response:
            text = await response.text()
            assert response.status == 200, text
            return text

    async def streams() -> list[str]:
        async with aiohttp.ClientSession(base_url + "/") as http:
            return await asyncio.gather(*(stream(http, *sent) for sent in GUIDELLM_BODIES))

    return asyncio.run(streams())


@pytest.mark.parametrize("number", range(len(GUIDELLM_BODIES)))
def test_guidellm_counts_tokens_in_every_chunk(guidellm_streams: list[str], number: int) -> None:
    text = guidellm_streams[number]
    *lines, done = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert not any("error" in chunk for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == TOKENS
    assert len(set(counts)) > 2
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert chunks[-1]["choices"] == []


# guidance's client for vLLM, and for SGLang

GUIDANCE_GRAMMAR = """%llguidance {}

start: "Ada is " age " and lives in " TOWN

age[capture, max_tokens=5]: AGE
AGE: /[0-9]{1,2}/
TOWN: "London"
    | "Paris"
"""
SENTENCE = re.compile("Ada is [0-9]{1,2} and lives in (London|Paris)")


@pytest.mark.parametrize(
    "fields",
    [
        {
            "guided_decoding_backend": "guidance",
            "guided_grammar": GUIDANCE_GRAMMAR,
            "structured_outputs": {"grammar": GUIDANCE_GRAMMAR},
        },
        {"ebnf": GUIDANCE_GRAMMAR},
        {"guided_decoding_backend": "guidance", "guided_regex": SENTENCE.pattern},
        {"regex": SENTENCE.pattern},
    ],
)
async def test_guidances_grammars(http: aiohttp.ClientSession, fields: dict[str, Any]) -> None:
    text, finish = await chat(http, max_tokens=40, **fields)
    assert SENTENCE.fullmatch(text), text
    assert finish == "stop"


# outlines: grammars for the library lark, which have no "::="

SUMS = """
?start: total
?total: item
    | total "+" item   -> add
?item: NUMBER          -> number
    | "(" total ")"
%import common.INT -> NUMBER
"""
TWO_NUMBERS = """
?start: item "+" item
?item: DIGITS -> digits
DIGITS: /[1-9][0-9]/
"""


@pytest.mark.parametrize("field", ["structured_outputs", "ebnf", "guided_grammar"])
async def test_outlines_grammars(http: aiohttp.ClientSession, field: str) -> None:
    grammar = {"grammar": TWO_NUMBERS} if field == "structured_outputs" else TWO_NUMBERS
    text, finish = await chat(http, max_tokens=20, **{field: grammar})
    assert re.fullmatch("[1-9][0-9][+][1-9][0-9]", text), text
    assert finish == "stop"


async def test_outlines_recursive_grammar(http: aiohttp.ClientSession) -> None:
    text, _ = await chat(http, max_tokens=20, structured_outputs={"grammar": SUMS})
    assert re.fullmatch(r"[0-9+()]+", text), text


# instructor's modes

PERSON: dict[str, Any] = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string", "maxLength": 20},
        "age": {"title": "Age", "type": "integer", "minimum": 0, "maximum": 120},
        "home": {"$ref": "#/$defs/Home"},
        "friend": {"anyOf": [{"$ref": "#/$defs/Home"}, {"type": "null"}], "default": None},
    },
    "required": ["name", "age", "home"],
    "$defs": {
        "Home": {
            "title": "Home",
            "type": "object",
            "properties": {"town": {"title": "Town", "type": "string", "maxLength": 20}},
            "required": ["town"],
        }
    },
}
INNER = {key: value for key, value in PERSON.items() if key != "title"}
FUNCTION = {"name": "Person", "description": "A person.", "parameters": INNER}
OTHER = {
    "name": "Place",
    "description": "A place.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}},
        "required": ["name"],
    },
}
INSTRUCTION = "Reply with JSON of this schema:\n" + json.dumps(PERSON, indent=2)
FORMAT = {"type": "json_schema", "json_schema": {"name": "Person", "schema": PERSON}}


def instructed() -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION}, *BODY["messages"]]


def unmentioned(value: Any) -> list[str]:
    """Properties of a person and of its parts that the schema does not name."""
    named = {"name", "age", "home", "friend", "town"}
    found = [] if not isinstance(value, dict) else [name for name in value if name not in named]
    inner = value.values() if isinstance(value, dict) else ()
    return found + [name for one in inner for name in unmentioned(one)]


@pytest.mark.parametrize("strict", [True, False, None])
async def test_instructors_json_schema_ends(
    http: aiohttp.ClientSession, strict: bool | None
) -> None:
    """A schema that allows any number of properties does not make the reply endless."""
    named = {**FORMAT["json_schema"], **({} if strict is None else {"strict": strict})}
    form = {"type": "json_schema", "json_schema": named}
    text, finish = await chat(http, response_format=form, max_tokens=1500)
    assert finish == "stop", text
    person = json.loads(text)
    jsonschema.validate(person, PERSON)
    if strict:
        assert not unmentioned(person)


@pytest.mark.parametrize("strict", [True, None])
async def test_instructors_tools(http: aiohttp.ClientSession, strict: bool | None) -> None:
    function = {**FUNCTION, **({"strict": True} if strict else {})}
    body = {
        **BODY,
        "max_tokens": 400,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "Person"}},
    }
    reply = await post(http, "chat/completions", body)
    first = reply["choices"][0]["message"]["tool_calls"][0]["function"]
    assert first["name"] == "Person"
    person = json.loads(first["arguments"])
    jsonschema.validate(person, PERSON)
    assert not unmentioned(person)


async def test_instructors_parallel_tools(http: aiohttp.ClientSession) -> None:
    body = {
        **BODY,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": one} for one in (FUNCTION, OTHER)],
        "tool_choice": "auto",
    }
    reply = await post(http, "chat/completions", body)
    assert reply["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


async def test_instructors_json(http: aiohttp.ClientSession) -> None:
    text, finish = await chat(
        http, messages=instructed(), response_format={"type": "json_object"}, max_tokens=300
    )
    assert text.startswith("{")
    if finish == "stop":
        assert isinstance(json.loads(text), dict)


async def test_instructors_markdown(http: aiohttp.ClientSession) -> None:
    ask = "Return the correct JSON response within a ```json codeblock."
    messages = [*instructed(), {"role": "user", "content": ask}]
    text, finish = await chat(http, messages=messages, max_tokens=40)
    assert (bool(text), finish in ("stop", "length")) == (True, True)
