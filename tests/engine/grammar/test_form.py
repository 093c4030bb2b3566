"""Schemas whose keywords have values of other forms than JSON Schema says."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.engine.grammars import BYTES

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.form import check_form
from chairlift.engine.grammar.language import compiled
from chairlift.engine.grammar.objects import bounded, closed
from chairlift.engine.messages import Grammar

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.floats(-2, 2)
    | st.sampled_from(["a", "object", "array", "string", "#/$defs/a", "#/properties/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "type", "$ref", "required"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties", "items", "prefixItems", "anyOf", "allOf", "oneOf"),
    *("$defs", "definitions", "$ref", "enum", "minItems", "format", "uniqueItems", "not", "if"),
)
SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=3),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2) | VALUES,
            "required": st.lists(st.sampled_from("ab"), max_size=2) | VALUES,
            "additionalProperties": inner | VALUES,
            "anyOf": st.lists(inner, max_size=2) | VALUES,
            "$defs": st.dictionaries(st.just("a"), inner, max_size=1) | VALUES,
        },
    ),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS)
def test_any_schema_compiles_or_is_refused(schema: dict[str, Any]) -> None:
    """Never another exception; and nothing is refused for its form that the library takes."""
    for rewritten in (bounded, closed):
        with suppress(ValueError):
            rewritten(schema)
    try:
        compiled(Grammar("json_schema", json.dumps(schema)), BYTES)
    except GrammarError as error:
        refusal = str(error)
    else:
        return
    if refusal.startswith("#/") and "/$defs/" not in refusal:  # it reads only those it needs
        assert LLMatcher(BYTES, f"start: %json {json.dumps(schema)}", log_level=0).is_error()


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"properties": ["a"]}, "#/properties must be an object whose values are schemas"),
        ({"properties": {"a": "b"}}, "#/properties must be an object whose values are schemas"),
        ({"required": "a"}, "#/required must be an array of strings"),
        ({"required": [["a"]]}, "#/required must be an array of strings"),
        ({"items": {"maxProperties": "1"}}, "#/items/maxProperties must be a number"),
        ({"anyOf": [{"allOf": {}}]}, "#/anyOf/0/allOf must be an array of schemas"),
        (
            {"properties": {"a/b": {"additionalProperties": 3}}},
            "#/properties/a~1b/additionalProperties must be a schema",
        ),
    ],
)
def test_the_error_names_the_place(schema: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        check_form(schema)


def test_null_counts_as_absent() -> None:
    check_form({"properties": None, "required": None, "items": {"maxProperties": None}})
