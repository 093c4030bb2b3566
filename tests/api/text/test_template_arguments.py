"""Arguments of earlier calls, as chat templates get them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.schemas.messages import FunctionCall, ToolCall
from chairlift.api.text.template import arguments_of

# Characters of all kinds, halves of characters included.
_TEXTS = st.text(st.characters(), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


def _called(text: str) -> ToolCall:
    return ToolCall(id="1", function=FunctionCall(name="f", arguments=text))


@given(_VALUES)
def test_any_arguments_can_be_encoded(value: object) -> None:
    text = json.dumps(value)
    arguments = arguments_of(_called(text))
    json.dumps(arguments, ensure_ascii=False).encode()
    assert arguments == text or isinstance(arguments, dict)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": [["\\ud83dx"]]}'])
def test_half_a_character_stays_as_written(text: str) -> None:
    assert arguments_of(_called(text)) == text


def test_a_pair_of_halves_is_a_character() -> None:
    assert arguments_of(_called('{"a": "\\ud83d\\ude00"}')) == {"a": "\U0001f600"}
