"""What the ingress reads of a body: the prompt's text and the model, for every API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.api.cluster.prompts import MAX_PROMPT_CHARS, read_body

TOLD = {"role": "user", "content": [{"type": "text", "text": "second"}]}
BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "first"}, TOLD]},
    {"prompt": "first second"},
    {"prompt": ["first", "second"]},
    {"instructions": "first", "input": "second"},
    {"instructions": "first", "input": [{"role": "user", "content": "second"}]},
    {"messages": [TOLD], "system": [{"type": "text", "text": "first"}]},
    {"prompt": "second", "system": "first"},
    {"input_prefix": "first second", "input_suffix": "third"},
    {"content": "first second"},
    {"messages": [TOLD], "tools": [{"name": "first"}]},
]


@pytest.mark.parametrize("body", BODIES)
def test_prompt_of_each_api(body: dict[str, Any]) -> None:
    text = read_body(json.dumps(body).encode()).prompt_text()
    assert 0 <= text.index("first") < text.index("second")


def test_token_ids() -> None:
    first, second = (
        read_body(json.dumps({"prompt": ids}).encode()).prompt_text() for ids in ([1, 23], [12, 3])
    )
    assert first != second


def test_same_beginning_has_the_same_prefix() -> None:
    messages = [{"role": "system", "content": "x" * 50}, {"role": "user", "content": "a"}]
    turns = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    one, two = (
        read_body(json.dumps({"messages": each}).encode()).prompt_text()
        for each in (messages, turns)
    )
    assert two.startswith(one)


def test_salts_keep_prompts_apart() -> None:
    one, two = (
        read_body(json.dumps({"prompt": "same", "cache_salt": salt}).encode()).prompt_text()
        for salt in ("a", "b")
    )
    assert one[0] != two[0]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
_FIELDS = st.sampled_from(("model", "messages", "prompt", "input", "system", "tools", "content"))


@pytest.mark.slow
@settings(suppress_health_check=list(HealthCheck))
@given(st.dictionaries(_FIELDS, _JSON, max_size=3))
def test_any_body_has_a_prompt_within_the_limit(body: dict[str, Any]) -> None:
    text = read_body(json.dumps(body).encode()).prompt_text()
    assert 0 < len(text) <= MAX_PROMPT_CHARS


@given(st.binary(max_size=200))
def test_no_body_fails(body: bytes) -> None:
    assert read_body(body).prompt_text()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        json.dumps({"prompt": "x" * 1_000_000}).encode(),
        json.dumps({"prompt": list(range(100_000))}).encode(),
        json.dumps({"tools": ["é" * 100_000]}, ensure_ascii=False).encode(),
    ],
    ids=["unclosed", "deep", "long", "ids", "tools"],
)
def test_large_bodies(body: bytes) -> None:
    assert 0 < len(read_body(body).prompt_text()) <= MAX_PROMPT_CHARS


def test_state_that_one_replica_keeps() -> None:
    assert read_body(b'{"previous_response_id":"r"}').needs_state == "previous_response_id"
    assert read_body(b'{"background":true}').needs_state == "background"
    assert read_body(b'{"background":false,"store":true}').needs_state is None
    assert read_body(b'{"previous_response_id":null}').needs_state is None


def test_model_name() -> None:
    assert read_body(b'{"model":"a","name":"b"}').model_name == "a"
    assert read_body(b'{"name":"b"}').model_name == "b"
    assert read_body(b'{"model":7}').model_name is None
