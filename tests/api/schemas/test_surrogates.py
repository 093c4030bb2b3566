"""Lone surrogates anywhere in a request: never a 5xx, and an error that names their place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import Running, engine_replying, running
from support.api.fields import BODIES

from chairlift.api.openai.batches.lines import LineError, LineRules, parse_line
from chairlift.api.schemas.decoding import dotted, refused_value

LONE = ["\ud800", "x\udbffy", "\udc00", "\ude00\ud83d", "a" * 20 + "\udfff" + "b" * 20]
Place = tuple[int | str, ...]


def texts_in(value: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(value, str):
        yield place
    elif isinstance(value, list | dict):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_in(inner, (*place, name))


def replaced(value: Any, place: Place, text: str) -> Any:
    """A copy of ``value`` with ``text`` at ``place``."""
    if not place:
        return text
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], text)
    return copy


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
async def test_in_any_text_of_a_request(server: Running, path: str) -> None:
    body = BODIES[path]
    for number, place in enumerate(texts_in(body)):
        lone = LONE[number % len(LONE)]
        status, reply = await server.post(path, replaced(body, place, lone))
        error = reply["error"]
        message = error if isinstance(error, str) else error["message"]
        assert status == 400
        name = dotted(place)
        first = next(char for char in lone if "\ud800" <= char <= "\udfff")
        assert message.startswith(f"{name}: \\u{ord(first):04x} is a lone surrogate")
        if isinstance(error, dict) and "param" in error:
            assert error["param"] == name


@pytest.mark.parametrize("path", BODIES)
async def test_in_the_name_of_a_field(server: Running, path: str) -> None:
    status, reply = await server.post(path, {**BODIES[path], "\ud800": 1})
    assert status == 400
    assert "\\ud800 is a lone surrogate" in json.dumps(reply).replace("\\\\", "\\")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("field", ["json_schema", "guided_json", "guided_regex", "grammar"])
async def test_in_json_within_a_text(server: Running, path: str, field: str) -> None:
    """The text itself is valid; a schema may then refuse what it means."""
    text = '{"type": "string", "const": "\\ud800"}'
    base = {**BODIES[path], "response_format": None, "guided_choice": None, "tools": None}
    base |= {"tool_choice": None, "guided_regex": None}
    status, reply = await server.post(path, {**base, field: text})
    assert status in (200, 400)
    assert "truncated" not in json.dumps(reply)
    if field in ("json_schema", "guided_json") and path != "/v1/messages":
        assert "lone surrogate" in reply["error"]["message"]


def test_in_a_line_of_a_batch() -> None:
    rules = LineRules("/v1/completions", None, 1000, 10)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    with pytest.raises(LineError, match=r"body\.prompt: \\ud800 is a lone surrogate"):
        parse_line(1, json.dumps(replaced(line, ("body", "prompt"), "\ud800")).encode(), rules)


PAIR = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.recursive(
        PAIR | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(PAIR, inner),
        max_leaves=20,
    )
)
def test_complete_pairs_are_no_lone_surrogates(value: Any) -> None:
    assert refused_value(json.dumps(value), ValueError()) is None
    assert refused_value(json.dumps({"a": value, "b": ["\ud83d"]}), ValueError()) is not None


@pytest.mark.parametrize(
    "text", [b'{"a":"\\ud800', b'{"a":"\\ud8', b"{", b"\xff", b'"\\\\ud800"', b"[" * 99_999]
)
def test_texts_that_are_invalid_otherwise(text: bytes) -> None:
    assert refused_value(text, ValueError()) is None


def test_the_place_of_a_deep_value_costs_little() -> None:
    deep = b'{"a":' * 500 + b"[" + b"1," * 500_000 + b'"\\ud800"]' + b"}" * 500
    found = refused_value(deep, ValueError())
    assert found is not None
    assert found.path is not None
    assert len(found.path) <= 200
