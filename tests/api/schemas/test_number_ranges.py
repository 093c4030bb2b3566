"""Numbers of any size, at every field that takes one: never a 5xx, and an error with the range."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import Running, engine_replying, running, tool
from support.api.fields import BODIES

from chairlift.api.ollama.options import OllamaOptions
from chairlift.api.openai.batches.lines import LineError, LineRules, parse_line
from chairlift.api.schemas.decoding import NotFinite, decoded
from chairlift.api.schemas.field_types import IGNORED, NOT_SUPPORTED
from chairlift.api.server.routes import ROUTES

KINDS = {route.path: route.request for route in ROUTES if route.request is not None}
# JSON texts of numbers that no field takes, though some servers' clients may send them.
HUGE = [str(2**64), str(-(2**64)), "9" * 400, "-" + "9" * 4000, "9" * 5000, "-" + "9" * 5000]
HUGE += ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"]
WHOLE = ["5.0", "0.5e1", "50e-1"]
ODD = ["-0.0", "0.0", "1e-400", "1.5", "true", '"5"', "[]", "{}"]
PLACEHOLDER = "the number"
RANGE = re.compile(
    r"must be (an integer|a number) (from -?[\d.]+ to [\d.]+|above 0 and at most \d+)"
)
# Numbers in nested objects.
NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"stop_token_ids": [1, PLACEHOLDER]}, "stop_token_ids[1]"),
    ("/v1/completions", {"logit_bias": {"5": PLACEHOLDER}}, "logit_bias"),
    ("/detokenize", {"tokens": [PLACEHOLDER]}, "tokens[0]"),
    (
        "/v1/messages",
        {"thinking": {"type": "enabled", "budget_tokens": PLACEHOLDER}},
        "thinking.budget_tokens",
    ),
    (
        "/v1/batches",
        {"output_expires_after": {"anchor": "created_at", "seconds": PLACEHOLDER}},
        "output_expires_after.seconds",
    ),
]
# Fields that exclude others, and those that make the reply something else than JSON.
EXCLUSIVE = ("suffix", "guided_regex", "guided_choice", "response_format", "tools", "tool_choice")


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


def properties_of(kind: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of a request with effect, and their JSON schemas, without null."""
    for name, schema in kind.model_json_schema()["properties"].items():
        if schema.get("description") not in (IGNORED, NOT_SUPPORTED):
            forms = schema.get("anyOf", [schema])
            yield name, next((form for form in forms if form.get("type") != "null"), {})


def numbers_of(kind: Any) -> list[str]:
    return [n for n, schema in properties_of(kind) if schema.get("type") in ("integer", "number")]


def with_number(body: Any, number: str) -> bytes:
    return json.dumps(body).replace(json.dumps(PLACEHOLDER), number).encode()


def plain(path: str) -> dict[str, Any]:
    """A body to which any one field can be added."""
    body = {name: value for name, value in BODIES[path].items() if name not in EXCLUSIVE}
    more = {"/v1/batches": {"completion_window": "24h"}, "/v1/responses": {"text": None}}
    return {**body, **more.get(path, {}), **({"stream": False} if "/api/" in path else {})}


def message_of(reply: Any) -> str:
    error = reply["error"]
    return error if isinstance(error, str) else error["message"]


def numbers_in(schema: Any, is_named: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
    """The core schemas of numbers, and whether their error names the range."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind in ("int", "float"):
            yield schema, is_named
        is_named = kind == "custom-error" or (is_named and kind == "function-before")
        for inner in schema.values():
            yield from numbers_in(inner, is_named)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from numbers_in(inner)


@pytest.mark.parametrize("path", KINDS)
def test_every_number_of_every_request_has_a_range_in_its_error(path: str) -> None:
    kind = KINDS[path]
    kind.model_rebuild()
    for schema, is_named in numbers_in(kind.__pydantic_core_schema__):
        if schema.keys() == {"type"}:
            continue  # token ids and biases, which a validator has checked before
        assert schema.keys() & {"ge", "gt"}, schema
        assert schema.keys() & {"le", "lt"}, schema
        assert is_named


async def check(server: Running, path: str, fields: Any, place: str, *others: str) -> None:
    """Sends each number in ``fields``; its error must name ``place`` and a range."""
    for number in [*HUGE, *others]:
        status, reply = await server.post(path, with_number({**plain(path), **fields}, number))
        assert status == 400, reply
        assert message_of(reply).startswith(f"{place}: "), (number, reply)
        assert RANGE.search(message_of(reply)), reply
    for number in ODD:
        status, _ = await server.post(path, with_number({**plain(path), **fields}, number))
        assert status < 500


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path, kind in KINDS.items() if numbers_of(kind)])
async def test_a_number_of_any_size(server: Running, path: str) -> None:
    for name in numbers_of(KINDS[path]):
        await check(server, path, {name: PLACEHOLDER}, name, '"5"')


async def test_an_integer_may_be_written_with_a_fraction_of_zero(server: Running) -> None:
    """JSON has one kind of number: 5.0 is an integer, for JSON Schema, vLLM and Ollama, too."""
    for number in ["5", *WHOLE]:
        for path, fields in (
            ("/v1/completions", {"max_tokens": PLACEHOLDER, "seed": PLACEHOLDER, "best_of": 1.0}),
            ("/api/generate", {"options": {"num_predict": PLACEHOLDER, "seed": PLACEHOLDER}}),
        ):
            body = with_number({**plain(path), **fields}, number)
            status, reply = await server.post(path, body)
            assert status == 200, reply
            params = server.engine.submitted[-1].params
            assert (params.max_tokens, params.seed) == (5, 5)
            assert type(params.max_tokens) is type(params.seed) is int


async def test_an_option_of_any_size(server: Running) -> None:
    for name in numbers_of(OllamaOptions):
        options = {"options": {name: PLACEHOLDER}}
        await check(server, "/api/generate", options, f"options.{name}", '"5"')


async def test_a_nested_number_of_any_size(server: Running) -> None:
    for path, fields, place in NESTED:
        await check(server, path, fields, place)


async def test_a_token_id_of_any_size(server: Running) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        for number in [*HUGE, *ODD[:4], str(2**63), str(2**31), "-1"]:
            for value in ([1, PLACEHOLDER], [[PLACEHOLDER]]):
                body = with_number({**plain(path), field: value}, number)
                status, reply = await server.post(path, body)
                assert status == 400, reply
                assert message_of(reply).startswith(field), (number, reply)


# Numbers within objects of any form, by the field that holds them.
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": PLACEHOLDER}}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": PLACEHOLDER}}
FREE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"tools": [tool("f", SCHEMA)], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"k": PLACEHOLDER}}),
    ("/v1/chat/completions", {"keep_alive": PLACEHOLDER, "unknown": {"a": [PLACEHOLDER]}}),
    ("/v1/completions", {"json_schema": SCHEMA}),
    ("/v1/completions", {"json_schema": json.dumps(SCHEMA)}),
    ("/v1/completions", {"metadata": {"k": PLACEHOLDER}}),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [CALL]}]}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": None}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}),
    ("/api/chat", {"format": SCHEMA, "tools": None}),
    ("/api/chat", {"keep_alive": PLACEHOLDER}),
]


@pytest.mark.parametrize(("path", "fields"), FREE)
async def test_a_number_of_any_size_in_an_object(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    for number in HUGE:
        text = with_number({**plain(path), **fields}, number)
        text = text.replace(b'\\"the number\\"', number.encode())
        status, reply = await server.post(path, text)
        assert status in (200, 400, 404), reply
        if len(number) > 4300 or not number.removeprefix("-").isdigit():
            assert status == 400
            assert "must be a number between" in message_of(reply)


def test_a_number_in_a_line_of_a_batch() -> None:
    rules = LineRules("/v1/completions", None, 10_000, 10)
    line = {"custom_id": PLACEHOLDER, "method": "POST", "url": "/v1/completions", "body": {}}
    for number in HUGE:
        with pytest.raises(LineError, match="custom_id"):
            parse_line(1, with_number(line, number), rules)


@given(
    st.recursive(
        st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.just("NaN"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=10,
    ),
    st.sampled_from([number for number in HUGE if len(number) > 4300 or "e" in number]),
)
def test_only_numbers_that_are_too_large_are_refused(value: Any, number: str) -> None:
    assert decoded(json.dumps(value)) == value
    with pytest.raises(NotFinite, match=r"a\[1\]: must be a number"):
        decoded(json.dumps({"b": value, "a": [0, PLACEHOLDER]}).replace(f'"{PLACEHOLDER}"', number))
