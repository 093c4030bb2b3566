"""Objects that a schema leaves open get bounds; their values still fit the schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.api.api_server import TOKENIZER, ids

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.language import compiled, lexicon
from chairlift.engine.grammar.names import other_names
from chairlift.engine.grammar.objects import (
    MAX_ENTRIES,
    MAX_FREE_DEPTH,
    MAX_NAME_CHARS,
    MAX_UNMENTIONED,
    bounded,
    closed,
)
from chairlift.engine.messages import Grammar

LEXICON = lexicon(TOKENIZER, 258).load()
INTEGER: dict[str, Any] = {"type": "integer"}
NAMED = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
ASCII = ids("".join(map(chr, range(32, 127))))
BOTH = {**NAMED, "required": ["a", "b"]}


def matcher(schema: Any) -> LLMatcher:
    return compiled(Grammar("json_schema", json.dumps(schema)), LEXICON)


def fits(grammar: LLMatcher, text: str) -> bool:
    fresh = grammar.deep_copy()
    tokens = ids(text)
    return bool(fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting())


def entries(count: int) -> str:
    """JSON of ``count`` entries, each after a comma."""
    return "".join(f',"n{i}":"x"' for i in range(count))


@pytest.mark.parametrize("schema", [NAMED, BOTH, {**NAMED, "required": ["a"]}])
def test_objects_with_named_properties_may_have_a_few_plain_others(schema: dict[str, Any]) -> None:
    grammar = matcher(schema)
    both = '{"a":1,"b":2'
    assert fits(grammar, both + "}")
    assert fits(grammar, both + entries(MAX_UNMENTIONED) + "}")
    assert not fits(grammar, both + entries(MAX_UNMENTIONED + 1) + "}")
    assert fits(grammar, f'{both},"{"x" * MAX_NAME_CHARS}":null}}')
    assert not fits(grammar, f'{both},"{"x" * (MAX_NAME_CHARS + 1)}":null}}')
    for value, allowed in (("1.5", True), ('"text"', True), ("[]", False), ("{}", False)):
        assert fits(grammar, f'{both},"c":{value}}}') == allowed
    # A named property cannot occur again with another value.
    assert not fits(grammar, f'{both},"b":"x"}}')
    assert fits(grammar, '{"a":1}') == ("b" not in schema.get("required", ()))


@pytest.mark.parametrize("schema", [NAMED, BOTH, {"$ref": "#/$defs/n", "$defs": {"n": NAMED}}])
def test_closed_objects_have_their_named_properties_only(schema: dict[str, Any]) -> None:
    grammar = matcher(closed(schema))
    assert fits(grammar, '{"a":1,"b":2}')
    assert not fits(grammar, '{"a":1,"b":2,"c":3}')


def test_closing_applies_to_all_parts_of_a_schema() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "array", "items": NAMED}}}
    schema = {
        "type": "object",
        "properties": {"one": {"anyOf": [inner, {"type": "null"}]}, "two": {"$ref": "#/$defs/t"}},
        "$defs": {"t": {"type": "object", "properties": {"properties": NAMED}}},
        # These are values, not schemas.
        "default": {"properties": {}},
        "examples": [{"properties": {}}],
    }
    text = json.dumps(closed(schema))
    assert text.count('"additionalProperties": false') == 5
    assert '"default": {"properties": {}}, "examples": [{"properties": {}}]' in text


TYPED_OTHERS = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER}
MAPS = [
    {"type": "object"},
    {"type": "object", "additionalProperties": True},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^n": {"type": "string"}}},
]


@pytest.mark.parametrize("schema", MAPS)
def test_maps_may_have_many_entries(schema: dict[str, Any]) -> None:
    grammar = matcher(schema)
    for count, fit in ((0, True), (1, True), (MAX_ENTRIES, True), (MAX_ENTRIES + 1, False)):
        assert fits(grammar, "{" + entries(count)[1:] + "}") == fit
    assert matcher(closed(schema)) is not None
    assert closed(schema) == schema


def test_a_schemas_own_additional_properties_are_kept() -> None:
    assert closed(TYPED_OTHERS) == TYPED_OTHERS
    assert fits(matcher({**TYPED_OTHERS, "required": ["a"]}), '{"a":1,"x":2}')
    assert not fits(matcher({**TYPED_OTHERS, "required": ["a"]}), '{"a":1,"x":"y"}')
    three = {"type": "object", "maxProperties": 100}
    assert fits(matcher(three), "{" + entries(100)[1:] + "}")
    least = {"type": "object", "minProperties": MAX_ENTRIES + 5}
    assert fits(matcher(least), "{" + entries(MAX_ENTRIES + 5)[1:] + "}")


def test_unconstrained_values_have_a_maximum_depth() -> None:
    grammar = matcher({"type": "object"})
    for depth, fit in ((1, True), (MAX_FREE_DEPTH, True), (MAX_FREE_DEPTH + 1, False)):
        assert fits(grammar, '{"a":' * (depth + 1) + "1" + "}" * (depth + 1)) == fit
        assert fits(grammar, '{"a":' + "[" * depth + "1" + "]" * depth + "}") == fit
    listed = matcher({"type": "array"})
    assert fits(listed, '[{"a":[1]}]')
    assert not fits(listed, "[" * 9 + "]" * 9)


def test_schemas_of_the_same_object_do_not_close_it_to_each_other() -> None:
    first = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
    together = [
        {"allOf": [first, second]},
        {"allOf": [{"$ref": "#/$defs/f"}, second], "$defs": {"f": first}},
        {**first, "anyOf": [second]},
        {**first, "$ref": "#/$defs/s", "$defs": {"s": {"$ref": "#/$defs/t"}, "t": second}},
    ]
    for schema in together:
        for grammar in (matcher(schema), matcher(closed(schema))):
            assert fits(grammar, '{"a":1,"b":2}'), schema
    alone = {"allOf": [{"$ref": "#/$defs/f"}], "description": "x", "$defs": {"f": first}}
    assert not fits(matcher(closed(alone)), '{"a":1,"b":2}')


def test_a_required_property_without_a_schema_is_allowed() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["z"]}
    for grammar in (matcher(schema), matcher(closed(schema))):
        assert fits(grammar, '{"a":1,"z":[{"y":1}]}')
        assert not fits(grammar, '{"a":1}')


def test_references_into_a_schema_still_work() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {**NAMED, "title": "one"}, "b": {"$ref": "#/properties/a"}},
    }
    assert fits(matcher(schema), '{"a":{"a":1},"b":{"b":2}}')
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}, "x": INTEGER}}
    assert fits(matcher(recursive), '{"next":{"next":{"x":1}},"x":2}')


@given(st.lists(st.text(min_size=1, max_size=6), max_size=6), st.text(max_size=9))
@example(["\x1f"], "\x1f0")
@example(["a\x1f"], "a")
@settings(deadline=None, max_examples=100)
def test_other_names_match_all_but_the_named_ones(taken: list[str], name: str) -> None:
    pattern = other_names(taken, 8)
    plain = all(char > "\x1f" for char in name)
    expected = 1 <= len(name) <= 8 and plain and name not in taken
    assert (re.fullmatch(pattern, name) is not None) == expected
    for one in taken:
        assert re.fullmatch(pattern, one) is None


SCALAR: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["x", 1]}, {"type": "boolean"}]
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    others = st.one_of(st.just(None), st.booleans(), inner)
    plain = st.builds(_object, properties, st.sets(st.sampled_from("abcz")), others)
    listed = st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
    either = st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)
    both = st.builds(lambda one, two: {"allOf": [one, two]}, plain, plain)
    return st.one_of(plain, plain, listed, either, both)


def _object(properties: Any, required: set[str], others: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = sorted(required)
    if others is not None:
        schema["additionalProperties"] = others
    return schema


def is_satisfiable(schema: Any) -> bool:
    """Whether the library can satisfy a schema and each schema in it."""
    if isinstance(schema, dict):
        if not all(is_satisfiable(one) for one in schema.get("properties", {}).values()):
            return False
        inner = [schema.get("items"), schema.get("additionalProperties")]
        inner += [one for name in ("anyOf", "allOf") for one in schema.get(name, ())]
        if not all(is_satisfiable(one) for one in inner if isinstance(one, dict)):
            return False
        source = LLMatcher.grammar_from_json_schema(schema)
        return not LLMatcher(LEXICON, source, log_level=0).is_error()
    return True


@pytest.mark.slow
@given(st.recursive(SCALAR, objects, max_leaves=6).filter(is_satisfiable), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_generated_texts_fit_the_original_schema(schema: Any, seed: int) -> None:
    """Random walks along the masks, which prefer to end strings and objects."""
    chance = random.Random(seed)
    for limited in (schema, closed(schema)):
        try:
            compiled_schema = matcher(limited)
        except GrammarError as error:
            # If a closed object lacks a property that another schema requires, it is a 400.
            assert limited is not schema
            assert "nsatisfiable" in str(error)  # noqa: PT017
            continue
        if (text := random_text(compiled_schema, chance)) is not None:
            jsonschema.validate(json.loads(text), schema)


def random_text(matcher: LLMatcher, chance: random.Random) -> str | None:
    """A random text that the matcher accepts; None if it became too long."""
    endings = ids('"}]')
    text: list[int] = []
    while len(text) < 600:
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5):
            return str(TOKENIZER.decode(text))
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        # Only ASCII: single bytes above 127 are not text.
        allowed = [token for token in ASCII if bits[token]]
        ending = [token for token in endings if bits[token]]
        text.append(
            chance.choice(ending if ending and chance.random() < 0.5 else allowed or ending)
        )
        assert matcher.consume_token(text[-1])
    return None


def test_closing_does_not_modify_the_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    before = json.dumps(schema)
    assert closed(schema) != schema
    assert bounded(schema) != schema
    assert json.dumps(schema) == before
