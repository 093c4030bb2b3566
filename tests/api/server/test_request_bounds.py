"""Bounds on requests: lists, values and errors are limited, and turns are joined in linear time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from chairlift.api.anthropic.history import messages_of
from chairlift.api.anthropic.request import MessagesRequest, Turn
from chairlift.api.chat.tool_form import as_text
from chairlift.api.schemas.bounds import (
    MAX_ENTRIES,
    MAX_PARTS,
    values_in,
    values_of,
    weight,
)
from chairlift.api.schemas.messages import Message
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.schemas import parse
from chairlift.api.server.routes import ROUTES
from chairlift.engine.errors import RequestError


def _lists(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for inner in schema.values():
            yield from _lists(inner, seen)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from _lists(inner, seen)


@pytest.mark.parametrize(
    "kind", [route.request for route in ROUTES if route.request], ids=lambda kind: kind.__name__
)
def test_every_list_of_every_request_is_bounded_and_stops_at_its_first_error(
    kind: type[Request],
) -> None:
    for schema in _lists(kind.__pydantic_core_schema__, set()):
        assert schema["fail_fast"]
        assert schema["max_length"] <= 1 << 20


JSON = st.recursive(
    st.sampled_from([None, True, 0, -1, 1e9, "", "a", {"type": "text"}, {"role": "user"}]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda some: some * 50)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([r.request for r in ROUTES if r.request]), st.data())
def test_a_wrong_request_has_few_errors(kind: type[Request], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.model_fields))
    body = data.draw(st.dictionaries(names, JSON, max_size=3))
    errors = 0
    try:
        parse(kind, json.dumps(body).encode())
    except ValidationError as error:
        errors = error.error_count()
    except RequestError:
        pass
    # One for each wrong or missing field, and for each field of an object.
    assert errors <= 40


@given(st.recursive(st.integers() | st.text(',[{"\\a', max_size=5), st.lists, max_leaves=20))
def test_counted_values_are_never_too_few(value: Any) -> None:
    text = json.dumps(value)
    assert weight(text.encode()) >= values_of(value) - 1 - (value == [])
    assert values_in(text, 1 << 30) >= values_in(text, 0) >= values_of(value) - 1 - (value == [])
    unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert values_in(text, 0) <= sum(map(unquoted.count, ",[{"))


def test_counting_a_text_of_quotation_marks_takes_linear_time() -> None:
    for text in ('"' * 4_000_000, '\\"' * 2_000_000, '"\\' * 2_000_000, "," * 4_000_000):
        began = time.thread_time()
        values_in(text, 0)
        assert time.thread_time() - began < 3


@pytest.mark.slow
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_turns_of_one_role_are_joined_in_linear_time(role: Any) -> None:
    """Joining them one by one would copy the text 4096 times."""
    block = {"type": "text", "text": "x" * 4000}
    turns = [Turn.model_validate({"role": role, "content": [block, block]}) for _ in range(4096)]
    began = time.thread_time()
    (message,) = messages_of([], turns)
    assert time.thread_time() - began < 2
    assert message["content"] == "\n\n".join(["x" * 8000] * 4096)


def test_blocks_of_one_turn_are_joined_in_linear_time() -> None:
    block = {"type": "text", "text": "x" * 4000}
    for role in ("user", "assistant"):
        turn = Turn.model_validate({"role": role, "content": [block] * MAX_ENTRIES})
        began = time.thread_time()
        (message,) = messages_of([], [turn])
        assert time.thread_time() - began < 2
        assert message["content"] == "x" * 4000 * MAX_ENTRIES


def test_users_behind_a_result_are_joined_in_linear_time() -> None:
    results = [Message(role="tool", content="result")]
    users = [Message(role="user", content="x" * 4000) for _ in range(4000)]
    began = time.thread_time()
    (message,) = as_text([*results, *users], None, False)
    assert time.thread_time() - began < 2
    assert message["content"].count("\nx") == 4000


def test_parts_and_values_are_limited_together() -> None:
    parts = [{"type": "text", "text": "a"}] * 1000
    turns = [{"role": "user", "content": parts}] * (MAX_PARTS // 1000 + 1)
    with pytest.raises(RequestError, match=f"at most {MAX_PARTS} parts") as caught:
        parse(MessagesRequest, json.dumps({"messages": turns, "max_tokens": 1}).encode())
    assert caught.value.param == "messages"
    few = {"messages": turns[:-1], "max_tokens": 1}
    assert len(parse(MessagesRequest, json.dumps(few).encode()).messages) == len(turns) - 1
