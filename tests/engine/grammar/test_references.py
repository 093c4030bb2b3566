"""A schema means the same at every place that a reference can point to."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api.api_server import ids
from support.engine.grammars import accepted_of, matcher

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.keywords import effective
from chairlift.engine.grammar.objects import bounded, closed
from chairlift.engine.grammar.references import with_definitions

TEXT: dict[str, Any] = {"type": "string", "maxLength": 3}
SAMPLES = ['"a"', '"abcd"', "1", "null", "[]", '["a"]', '["a","a"]', "{}", '{"a":"x"}']
SAMPLES += ['{"a":"x","b":2}', '{"b":2}', '{"a":1}', '{"a":"x","c":"y"}', '{"z":[]}']
# Each has keywords without effect, which the library refuses, and what it means without them.
NOISY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"type": "array", "items": TEXT, "uniqueItems": False},
        {"type": "array", "items": TEXT},
    ),
    ({**TEXT, "not": False, "format": "password"}, TEXT),
    (
        {
            "type": "object",
            "properties": {"a": {**TEXT, "if": {}, "then": True}, "b": {"type": "integer"}},
            "dependentRequired": {},
            "required": ["a"],
        },
        {
            "type": "object",
            "properties": {"a": TEXT, "b": {"type": "integer"}},
            "required": ["a"],
        },
    ),
    ({"type": "object", "patternProperties": {}, "propertyNames": True}, {"type": "object"}),
]
# Schemas whose property "x" refers to the inner schema at different places.
PLACES = {
    "#/$defs/s": {"$defs": {"s": "inner"}},
    "#/definitions/s": {"definitions": {"s": "inner"}},
    "#/properties/y": {"properties": {"y": "inner"}},
    "#/properties/y/properties/z": {
        "properties": {"y": {"type": "object", "properties": {"z": "inner"}}}
    },
    "#/properties/y/items": {"properties": {"y": {"type": "array", "items": "inner"}}},
    "#/properties/y/anyOf/1": {"properties": {"y": {"anyOf": [{"type": "null"}, "inner"]}}},
    "#/definitions/s/properties/z": {
        "definitions": {"s": {"type": "object", "properties": {"z": "inner"}}}
    },
    "#/$defs/n/$defs/s": {"$defs": {"n": {"$defs": {"s": "inner"}}}},
    "#/components/schemas/s": {"components": {"schemas": {"s": "inner"}}},
    "#/x-list/1": {"x-list": [{}, "inner"]},
    "#/x-s": {"x-s": "inner"},
    "#/properties/a~1b~0c%20%C3%A9": {"properties": {"a/b~c é": "inner"}},
}


def with_inner(schema: Any, inner: Any) -> Any:
    if isinstance(schema, dict):
        return {name: with_inner(one, inner) for name, one in schema.items()}
    if isinstance(schema, list):
        return [with_inner(one, inner) for one in schema]
    return inner if schema == "inner" else schema


def referring(place: str, inner: Any) -> dict[str, Any]:
    """A schema whose property "x" refers to ``inner`` at ``place``."""
    schema: dict[str, Any] = {"type": "object", **with_inner(PLACES[place], inner)}
    named = {"x": {"$ref": place}, **schema.get("properties", {})}
    return {**schema, "properties": named, "required": ["x"], "additionalProperties": False}


def accepted(schema: Any) -> list[str]:
    """The samples that may be the property "x"."""
    return accepted_of([f'{{"x":{sample}}}' for sample in SAMPLES], schema)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("noisy", "plain"), NOISY)
def test_keywords_without_effect_at_every_place(
    place: str, noisy: dict[str, Any], plain: dict[str, Any]
) -> None:
    inline = {"type": "object", "properties": {"x": plain}, "required": ["x"]}
    expected = accepted({**inline, "additionalProperties": False})
    assert expected
    assert accepted(referring(place, noisy)) == expected
    strict = {**inline, "additionalProperties": False}
    assert accepted(closed(referring(place, noisy))) == accepted(closed(strict))


@pytest.mark.parametrize("place", PLACES)
def test_keywords_with_an_effect_are_refused_by_name_at_every_place(place: str) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        matcher(referring(place, {"type": "array", "uniqueItems": True}))


@pytest.mark.parametrize("place", PLACES)
def test_objects_are_bounded_at_every_place(place: str) -> None:
    """No grammar allows an unlimited number of properties."""
    schema = bounded(referring(place, {"type": "object", "title": "free"}))
    used = {**schema["$defs"], **schema.get("definitions", {})}.values()
    assert [one["maxProperties"] for one in used if one.get("title") == "free"] == [64]


def test_references_in_referenced_places() -> None:
    """Also to each other, to places within each other, and round in a circle."""
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/x/a"}},
        "required": ["x"],
        "x": {
            "a": {
                "type": "object",
                "uniqueItems": False,
                "properties": {
                    "a": {"$ref": "#/x/b"},
                    "b": {"$ref": "#/x/a/properties/a"},
                    "next": {"$ref": "#/x/a"},
                    "all": {"$ref": "#"},
                },
            },
            "b": {"$ref": "#/x/c"},
            "c": {"type": "string", "maxLength": 1, "not": False},
        },
    }
    grammar = matcher(schema)
    text = '{"x":{"a":"1","b":"2","next":{"a":"3","next":{}},"all":{"x":{}}}}'
    assert grammar.deep_copy().try_consume_tokens(ids(text)) == len(ids(text))
    assert grammar.try_consume_tokens(ids('{"x":{"next":{"b":"12"')) < 22


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/definitions/b"}},
            "definitions": {"b": TEXT},
        },
        {"properties": {"a": {"const": {"$ref": "#/properties/b"}}, "b": TEXT}},
        {"properties": {"$ref": {"type": "string"}, "a": {"enum": [{"$ref": "#/a"}]}}},
        {
            "properties": {
                "a": {"$id": "https://example.com/a", "$ref": "#/properties/b"},
                "b": TEXT,
            }
        },
    ],
    ids=json.dumps,
)
def test_what_needs_no_move_stays(schema: dict[str, Any]) -> None:
    assert with_definitions(schema) == schema
    assert effective(schema) == schema


@pytest.mark.parametrize("place", ["#/nothing", "#/properties/9", "#/x/2", "#/x/-1", "#/x/a", "#a"])
def test_references_to_nothing_are_refused(place: str) -> None:
    schema = {"properties": {"a": {"$ref": place}}, "x": [1, 2]}
    with pytest.raises(GrammarError):
        matcher(schema)


def nested(depth: int) -> dict[str, Any]:
    """Places within each other, each of which something refers to."""
    inner: dict[str, Any] = TEXT
    references = {}
    for number in range(depth):
        inner = {"type": "object", "properties": {"p": inner, f"f{number}": TEXT}}
        references[f"r{number}"] = {"$ref": "#/properties/p" + "/properties/p" * number}
    return {"type": "object", "properties": {"p": inner, **references}}


def test_places_within_each_other_cost_little() -> None:
    began = time.process_time()
    schema = nested(60)
    moved = with_definitions(schema)
    assert len(json.dumps(moved)) < 4 * len(json.dumps(schema))
    assert time.process_time() - began < 1


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.sampled_from([True, TEXT, {"$ref": "#"}, {"$ref": "#/properties/a"}, {"$ref": "#/x/0"}]),
        lambda inner: (
            st.builds(lambda one: {"type": "array", "items": one}, inner)
            | st.builds(lambda one: {"type": "object", "properties": {"a": one}}, inner)
            | st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner)
            | st.builds(lambda one: {"properties": {"a": one}, "x": [one]}, inner)
        ),
        max_leaves=5,
    ).filter(lambda schema: isinstance(schema, dict))
)
def test_any_schema_keeps_its_size_and_is_moved_only_once(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    moved = with_definitions(schema)
    assert json.dumps(schema) == before
    assert with_definitions(moved) == moved
