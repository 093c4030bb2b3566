"""Keywords that the grammar library alone would enforce only in part."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from support.engine.grammars import accepted_of

from chairlift.engine.grammar.objects import closed

# Objects with any of these properties, each of a small number, a large one or a text.
OBJECTS = [
    json.dumps(dict(zip(names, values, strict=True)))
    for count in range(4)
    for names in itertools.combinations(("ab", "b", "ac"), count)
    for values in itertools.product((3, 9, "x"), repeat=count)
]
NUMBERS = ["0", "1", "-1", "0.4", "0.6", "1.4", "1.6", "-1.4", "-1.6", "-0.4", "2", "-2"]
PATTERN: dict[str, Any] = {"type": "object", "patternProperties": {"^a": {"maximum": 5}}}
INTEGER = {"type": "integer"}


def unsound(texts: list[str], schema: Any) -> list[str]:
    """The texts that the schema's grammar accepts although they do not fit the schema."""
    validator = jsonschema.Draft202012Validator(schema)
    return [t for t in accepted_of(texts, schema) if not validator.is_valid(json.loads(t))]


@pytest.mark.parametrize(
    "schema",
    [
        PATTERN | {"properties": {"ab": INTEGER}},
        PATTERN | {"properties": {"ab": INTEGER}, "required": ["ab"]},
        PATTERN | {"properties": {"ab": INTEGER}, "additionalProperties": False},
        PATTERN | {"properties": {"b": {}, "ab": INTEGER}, "additionalProperties": INTEGER},
        PATTERN | {"properties": {"ab": {}}, "allOf": [{"properties": {"b": INTEGER}}]},
        {"anyOf": [PATTERN | {"properties": {"ab": {}}}, {"type": "null"}]},
        {"$ref": "#/$defs/p", "$defs": {"p": PATTERN | {"properties": {"ab": {}, "b": {}}}}},
    ],
    ids=json.dumps,
)
def test_patterns_apply_to_named_properties(schema: dict[str, Any]) -> None:
    for form in (schema, closed(schema)):
        assert unsound(OBJECTS, form) == []
        accepted = accepted_of(OBJECTS, form)
        assert '{"ab": 3}' in accepted
        assert '{"ab": 9}' not in accepted


@pytest.mark.parametrize("others", [{}, {"additionalProperties": INTEGER}], ids=json.dumps)
@pytest.mark.parametrize("pattern", ["^b", "^c"])
def test_required_properties_may_be_described_by_a_pattern(
    pattern: str, others: dict[str, Any]
) -> None:
    schema = {
        "type": "object",
        "properties": {"ab": INTEGER},
        "required": ["b"],
        "patternProperties": {pattern: INTEGER},
        **others,
    }
    assert unsound(OBJECTS, schema) == []
    assert '{"ab": 3, "b": 3}' in accepted_of(OBJECTS, schema)


def test_a_recursive_pattern_beside_names() -> None:
    schema = {**PATTERN, "properties": {"v": INTEGER}, "required": ["v"]}
    schema["patternProperties"] = {"^a": {"$ref": "#"}}
    texts = ['{"v": 1}', '{"v": 1, "a": {"v": 2}}', '{"v": 1, "a": 2}', '{"v": 1, "a": {}}']
    assert accepted_of(texts, schema) == texts[:2]


@pytest.mark.parametrize("low", [None, -1.5, -1, -0.5, 0, 0.5, 1])
@pytest.mark.parametrize("high", [None, -1, -0.5, 0, 0.5, 1, 1.5])
def test_exclusive_bounds(low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        return
    bounds = {("minimum", "exclusiveMinimum"): low, ("maximum", "exclusiveMaximum"): high}
    for keywords in itertools.product(*bounds):
        limits = zip(keywords, bounds.values(), strict=True)
        schema = {"type": "number"} | {k: limit for k, limit in limits if limit is not None}
        validator = jsonschema.Draft202012Validator(schema)
        fitting = [number for number in NUMBERS if validator.is_valid(json.loads(number))]
        assert accepted_of(NUMBERS, schema) == fitting, schema


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": 0, "maximum": 2**256 - 1},
        {"minimum": -1e308, "maximum": 1.7976931348623157e308},
        {"exclusiveMinimum": -3.4028234663852886e38},
        {"exclusiveMaximum": 1e30},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("kind", ["integer", "number", ["number", "null"]], ids=json.dumps)
def test_bounds_of_wide_number_types(kind: object, bounds: dict[str, float]) -> None:
    far = [str(sign * 2**power) for sign in (-1, 1) for power in (63, 64, 256, 1024)]
    texts = ["0", "7", "1000000000000", *far]
    schema = {"type": kind, **bounds}
    assert unsound(texts, schema) == []
    assert accepted_of(texts, schema)[:3] == texts[:3]


def test_the_highest_integer_of_64_bits() -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    assert accepted_of([str(2**63 - 1), str(2**63)], schema) == [str(2**63 - 1)]
