"""Keywords without effect change no grammar; the others are enforced or refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.grammars import BYTES, accepted_of, matcher

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.keywords import effective, says_nothing
from chairlift.engine.grammar.language import compiled
from chairlift.engine.grammar.objects import closed
from chairlift.engine.messages import Grammar

TEXT: dict[str, Any] = {"type": "string", "maxLength": 3}
NAMED = {"type": "object", "properties": {"a": TEXT, "b": {"type": "integer"}}, "required": ["a"]}
SAMPLES = [
    *('""', '"a"', '"abcd"', "1", "-1.5", "null", "true", "[]", '["a"]', '["a","a"]', "[1,[]]"),
    *("{}", '{"a":"x"}', '{"a":"x","b":2}', '{"b":2}', '{"a":1}', '{"a":"x","c":"y"}', '{"z":[]}'),
]
# Keywords by themselves, each with values that have no effect in any schema.
NO_EFFECT: dict[str, list[Any]] = {
    "uniqueItems": [False],
    "minItems": [0, 0.0],
    "minLength": [0, 0.0],
    "minProperties": [0, 0.0],
    "minContains": [0, 1, 5],
    "maxContains": [0, 5],
    "dependentRequired": [{}, {"a": []}],
    "dependentSchemas": [{}, {"a": True}, {"a": {"title": "t"}}],
    "dependencies": [{}, {"a": []}, {"a": {}}],
    "patternProperties": [{}],
    "propertyNames": [True, {}, {"type": "string"}],
    "unevaluatedProperties": [True, {}],
    "unevaluatedItems": [True, {}],
    "not": [False],
    "if": [True, False, {"type": "string"}],
    "then": [True, False, {"type": "string"}],
    "else": [True, False, {"type": "string"}],
    "required": [[]],
    "format": ["unknown", "", "int32", "double", "password", "binary", "x-mine"],
    "exclusiveMinimum": [False],
    "exclusiveMaximum": [False],
    "$comment": ["c"],
    "$anchor": ["a"],
    "$dynamicAnchor": ["a"],
    "$recursiveAnchor": [True, False],
    "$schema": ["https://json-schema.org/draft/2020-12/schema"],
    "title": ["t"],
    "description": ["uniqueItems"],
    "default": [None, 1, {"uniqueItems": True}],
    "deprecated": [True, False],
    "readOnly": [True],
    "writeOnly": [False],
    "examples": [[], [{"not": {}}]],
    "example": [1],
    "contentEncoding": ["base64"],
    "contentMediaType": ["text/plain"],
    "contentSchema": [{"uniqueItems": True}],
    "pattern": [None],
    "properties": [None],
    "items": [None],
    "enum": [None],
    "$ref": [None],
    "additionalProperties": [None],
    "maximum": [None],
    "nullable": [False],
    "discriminator": [{"propertyName": "a"}],
    "x-order": [1],
    "propertyOrdering": [["a"]],
}
# Several keywords that have no effect together.
TOGETHER: list[dict[str, Any]] = [
    {"contains": {"type": "string"}, "minContains": 0},
    {"if": {"type": "string"}, "then": True, "else": {}},
    {"if": {"type": "string"}, "then": {"description": "d"}},
]
# Added to other schemas, these would limit the kind of value.
OF_OBJECTS = ("minProperties", "patternProperties", "required")


def accepted(schema: Any) -> list[str]:
    return accepted_of(SAMPLES, schema)


def grouped(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that contain those of ``inner``."""
    properties = st.dictionaries(st.sampled_from(["a", "b", "uniqueItems"]), inner, max_size=2)
    return (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda named: {"type": "object", "properties": named}, properties)
        | st.builds(
            lambda one, names: {
                "type": "object",
                "properties": dict.fromkeys(names, one),
                "required": names,
                "additionalProperties": False,
            },
            inner,
            st.lists(st.sampled_from(["a", "b"]), unique=True),
        )
        | st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner)
        | st.builds(lambda one: {"allOf": [one]}, inner)
    )


LEAVES: list[dict[str, Any]] = [
    *(TEXT, NAMED, {"type": "integer"}, {"type": ["string", "null"]}, {"enum": ["a", 1]}),
    *({"const": "a"}, {"type": "string", "format": "date"}, {"type": "array", "items": TEXT}),
    {"type": "object"},
]
SCHEMAS = st.recursive(st.sampled_from(LEAVES), grouped, max_leaves=4)


def noisy(schema: Any, draw: Any) -> Any:
    """A copy of ``schema`` in which schemas have some keywords without effect, too."""
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "properties":
            copy[keyword] = {name: noisy(one, draw) for name, one in value.items()}
        elif keyword in ("anyOf", "allOf"):
            copy[keyword] = [noisy(one, draw) for one in value]
        else:
            copy[keyword] = noisy(value, draw) if keyword == "items" else value
    keywords = draw(st.lists(st.sampled_from(sorted(NO_EFFECT)), max_size=4, unique=True))
    for keyword in keywords:
        # Together, these have an effect.
        if keyword in ("if", "then", "else") and copy.keys() & {"if", "then", "else"}:
            continue
        copy.setdefault(keyword, draw(st.sampled_from(NO_EFFECT[keyword])))
    return copy


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data(), SCHEMAS)
def test_keywords_without_effect_change_nothing(data: st.DataObject, schema: Any) -> None:
    assert accepted(noisy(schema, data.draw)) == accepted(schema)


@pytest.mark.slow
@pytest.mark.parametrize("keyword", NO_EFFECT)
@pytest.mark.parametrize("schema", [*LEAVES, {}], ids=lambda schema: json.dumps(schema)[:30])
def test_each_keyword_without_effect(keyword: str, schema: dict[str, Any]) -> None:
    if keyword in schema or (not schema and keyword in OF_OBJECTS):
        return
    expected = accepted(schema)
    for value in NO_EFFECT[keyword]:
        assert accepted({**schema, keyword: value}) == expected, value
        inner = {"type": "object", "properties": {"p": {**schema, keyword: value}}}
        matcher({"$ref": "#/$defs/inner", "$defs": {"inner": inner}})


@pytest.mark.parametrize("keywords", TOGETHER, ids=json.dumps)
@pytest.mark.parametrize("schema", LEAVES, ids=lambda schema: json.dumps(schema)[:30])
def test_keywords_without_effect_together(keywords: dict[str, Any], schema: dict[str, Any]) -> None:
    assert accepted({**schema, **keywords}) == accepted(schema)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"uniqueItems": 0}, "uniqueItems"),
        ({"contains": {}}, "contains"),
        ({"contains": {}, "minContains": False}, "contains"),
        ({"contains": {}, "minContains": 0, "maxContains": 1}, "contains"),
        ({"contains": True, "minContains": 2}, "contains"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"dependentSchemas": {"a": False}}, "dependentSchemas"),
        ({"dependencies": {"a": ["b"]}}, "dependencies"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"propertyNames": {"type": "integer"}}, "propertyNames"),
        ({"propertyNames": False}, "propertyNames"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"unevaluatedItems": {"type": "string"}}, "unevaluatedItems"),
        ({"not": True}, "not"),
        ({"not": {}}, "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "if"),
        ({"if": True, "else": False}, "if"),
        ({"format": "regex"}, "regex"),
        ({"format": "json-pointer"}, "json-pointer"),
        ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, "$dynamicRef"),
    ],
    ids=json.dumps,
)
def test_keywords_with_an_effect_are_refused_by_name(keywords: dict[str, Any], named: str) -> None:
    for schema in (keywords, {"type": "array", "items": keywords}):
        with pytest.raises(GrammarError) as error:
            matcher(schema)
        assert named in str(error.value)


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("keyword", ["minProperties", "maxProperties"])
def test_numbers_of_properties(keyword: str, count: int) -> None:
    schema = {**NAMED, "additionalProperties": False}
    is_min = keyword == "minProperties"
    fitting = [
        text
        for text in accepted(schema)
        if (len(json.loads(text)) >= count if is_min else len(json.loads(text)) <= count)
    ]
    try:
        assert accepted({**schema, keyword: count}) == fitting
    except GrammarError:
        # The library cannot count optional properties.
        assert fitting != accepted(schema)


def test_errors_show_nothing_of_a_grammar_that_the_server_made() -> None:
    text = 'start: "a" item\nitem: %json {"uniqueItems": true}\n'
    with pytest.raises(GrammarError, match="uniqueItems") as error:
        compiled(Grammar("lark", text), BYTES)
    assert "start" not in str(error.value)
    assert "|" not in str(error.value)
    assert "^" not in str(error.value)


def test_a_constant_may_be_null() -> None:
    assert accepted({"const": None}) == ["null"]


def test_an_empty_keyword_leaves_no_object_open() -> None:
    assert closed({**NAMED, "patternProperties": {}}) == closed(NAMED)


@pytest.mark.parametrize("depth", [64, 100, 150, 200, 300, 400, 600, 900, 2000, 10_000])
@pytest.mark.parametrize("start", ['{"items":', '{"type":"array","items":', '{"anyOf":[{},'])
def test_deep_schemas_are_compiled_or_refused(start: str, depth: int) -> None:
    text = start * depth + "{}" + ("]}" if "[" in start else "}") * depth
    with suppress(GrammarError):
        compiled(Grammar("json_schema", text), BYTES)


def test_values_and_names_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"const": {"not": False}}, "not": {"enum": [{"if": 1}]}},
        "default": {"format": "x"},
    }
    assert effective(schema) == schema
    assert not says_nothing({"const": 1})
    assert says_nothing({"description": "d", "contentEncoding": "base64"})
