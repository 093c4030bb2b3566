"""Objects that a schema leaves open: what is made of them ends, and fits the schema that was."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
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


def fits(held: LLMatcher, text: str) -> bool:
    own = held.deep_copy()
    tokens = ids(text)
    return bool(own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting())


def names(count: int) -> str:
    return "".join(f',"n{i}":"x"' for i in range(count))


@pytest.mark.parametrize("schema", [NAMED, BOTH, {**NAMED, "required": ["a"]}])
def test_named_properties_have_a_few_plain_ones_beside_them(schema: dict[str, Any]) -> None:
    held = matcher(schema)
    both = '{"a":1,"b":2'
    assert fits(held, both + "}")
    assert fits(held, both + names(MAX_UNMENTIONED) + "}")
    assert not fits(held, both + names(MAX_UNMENTIONED + 1) + "}")
    assert fits(held, f'{both},"{"x" * MAX_NAME_CHARS}":null}}')
    assert not fits(held, f'{both},"{"x" * (MAX_NAME_CHARS + 1)}":null}}')
    for value, plain in (("1.5", True), ('"text"', True), ("[]", False), ("{}", False)):
        assert fits(held, f'{both},"c":{value}}}') == plain
    # Named ones are not mentioned twice, with other values.
    assert not fits(held, f'{both},"b":"x"}}')
    assert fits(held, '{"a":1}') == ("b" not in schema.get("required", ()))


@pytest.mark.parametrize("schema", [NAMED, BOTH, {"$ref": "#/$defs/n", "$defs": {"n": NAMED}}])
def test_closed_objects_have_their_named_properties_only(schema: dict[str, Any]) -> None:
    held = matcher(closed(schema))
    assert fits(held, '{"a":1,"b":2}')
    assert not fits(held, '{"a":1,"b":2,"c":3}')


def test_closing_goes_through_a_whole_schema() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "array", "items": NAMED}}}
    schema = {
        "type": "object",
        "properties": {"one": {"anyOf": [inner, {"type": "null"}]}, "two": {"$ref": "#/$defs/t"}},
        "$defs": {"t": {"type": "object", "properties": {"properties": NAMED}}},
        # No schemas.
        "default": {"properties": {}},
        "examples": [{"properties": {}}],
    }
    text = json.dumps(closed(schema))
    assert text.count('"additionalProperties": false') == 5
    assert '"default": {"properties": {}}, "examples": [{"properties": {}}]' in text


SAYS = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER}
MAPS = [
    {"type": "object"},
    {"type": "object", "additionalProperties": True},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^n": {"type": "string"}}},
]


@pytest.mark.parametrize("schema", MAPS)
def test_maps_have_many_entries(schema: dict[str, Any]) -> None:
    held = matcher(schema)
    for count, fit in ((0, True), (1, True), (MAX_ENTRIES, True), (MAX_ENTRIES + 1, False)):
        assert fits(held, "{" + names(count)[1:] + "}") == fit
    assert matcher(closed(schema)) is not None
    assert closed(schema) == schema


def test_what_a_schema_says_of_its_others_stays() -> None:
    assert closed(SAYS) == SAYS
    assert fits(matcher({**SAYS, "required": ["a"]}), '{"a":1,"x":2}')
    assert not fits(matcher({**SAYS, "required": ["a"]}), '{"a":1,"x":"y"}')
    three = {"type": "object", "maxProperties": 100}
    assert fits(matcher(three), "{" + names(100)[1:] + "}")
    least = {"type": "object", "minProperties": MAX_ENTRIES + 5}
    assert fits(matcher(least), "{" + names(MAX_ENTRIES + 5)[1:] + "}")


def test_values_of_which_nothing_is_said_have_a_depth() -> None:
    held = matcher({"type": "object"})
    for depth, fit in ((1, True), (MAX_FREE_DEPTH, True), (MAX_FREE_DEPTH + 1, False)):
        assert fits(held, '{"a":' * (depth + 1) + "1" + "}" * (depth + 1)) == fit
        assert fits(held, '{"a":' + "[" * depth + "1" + "]" * depth + "}") == fit
    listed = matcher({"type": "array"})
    assert fits(listed, '[{"a":[1]}]')
    assert not fits(listed, "[" * 9 + "]" * 9)


def test_objects_that_several_schemas_describe_stay_open_to_each_other() -> None:
    first = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
    together = [
        {"allOf": [first, second]},
        {"allOf": [{"$ref": "#/$defs/f"}, second], "$defs": {"f": first}},
        {**first, "anyOf": [second]},
        {**first, "$ref": "#/$defs/s", "$defs": {"s": {"$ref": "#/$defs/t"}, "t": second}},
    ]
    for schema in together:
        for held in (matcher(schema), matcher(closed(schema))):
            assert fits(held, '{"a":1,"b":2}'), schema
    alone = {"allOf": [{"$ref": "#/$defs/f"}], "description": "x", "$defs": {"f": first}}
    assert not fits(matcher(closed(alone)), '{"a":1,"b":2}')


def test_a_required_property_that_is_not_named_can_be_given() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["z"]}
    for held in (matcher(schema), matcher(closed(schema))):
        assert fits(held, '{"a":1,"z":[{"y":1}]}')
        assert not fits(held, '{"a":1}')


def test_references_into_a_schema_still_lead_somewhere() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {**NAMED, "title": "one"}, "b": {"$ref": "#/properties/a"}},
    }
    assert fits(matcher(schema), '{"a":{"a":1},"b":{"b":2}}')
    itself = {"type": "object", "properties": {"next": {"$ref": "#"}, "x": INTEGER}}
    assert fits(matcher(itself), '{"next":{"next":{"x":1}},"x":2}')


@given(st.lists(st.text(min_size=1, max_size=6), max_size=6), st.text(max_size=9))
@settings(deadline=None, max_examples=200)
def test_other_names_are_all_but_the_named_ones(taken: list[str], name: str) -> None:
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


def can_be(schema: Any) -> bool:
    """Whether something fits a schema and each schema in it, as the library reads them."""
    if isinstance(schema, dict):
        if not all(can_be(one) for one in schema.get("properties", {}).values()):
            return False
        inner = [schema.get("items"), schema.get("additionalProperties")]
        inner += [one for name in ("anyOf", "allOf") for one in schema.get(name, ())]
        if not all(can_be(one) for one in inner if isinstance(one, dict)):
            return False
        source = LLMatcher.grammar_from_json_schema(schema)
        return not LLMatcher(LEXICON, source, log_level=0).is_error()
    return True


@given(st.recursive(SCALAR, objects, max_leaves=6).filter(can_be), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_whatever_is_written_fits_the_schema_that_was_given(schema: Any, seed: int) -> None:
    """A random walk along the masks, which ends strings and objects more often than not."""
    chance = random.Random(seed)
    for limited in (schema, closed(schema)):
        try:
            compiled_schema = matcher(limited)
        except GrammarError as error:
            # Bounds can leave nothing that fits a required property: that is a 400.
            assert "nsatisfiable" in str(error)  # noqa: PT017
            continue
        if (written := walk(compiled_schema, chance)) is not None:
            jsonschema.validate(json.loads(written), schema)


def walk(held: LLMatcher, chance: random.Random) -> str | None:
    """A text that fits; None if it became too long."""
    endings = ids('"}]')
    text: list[int] = []
    while len(text) < 600:
        if held.is_stopped() or (held.is_accepting() and chance.random() < 0.5):
            return str(TOKENIZER.decode(text))
        bits = np.unpackbits(np.frombuffer(held.compute_bitmask(), np.uint8), bitorder="little")
        # Of bytes above 127, most are no text by themselves.
        allowed = [token for token in ASCII if bits[token]]
        over = [token for token in endings if bits[token]]
        text.append(chance.choice(over if over and chance.random() < 0.5 else allowed or over))
        assert held.consume_token(text[-1])
    return None


def test_a_schema_is_not_changed_itself() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    before = json.dumps(schema)
    assert closed(schema) != schema
    assert bounded(schema) != schema
    assert json.dumps(schema) == before
