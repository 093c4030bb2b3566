"""Checks the form of the keywords of a JSON schema that the other modules read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chairlift.engine.grammar.subschemas import Object, Schema, changed, is_number, is_schema


class _Form(NamedTuple):
    """The form that a keyword's value must have.

    Attributes:
        words: the form in words, for errors.
        fits: whether a value has it.
    """

    words: str
    fits: Callable[[Any], bool]


def check_form(schema: Object) -> None:
    """Checks a schema and all schemas within it. A keyword that is null counts as absent.

    Raises:
        ValueError: a keyword's value has another form than JSON Schema says. The text has the
            keyword's place as a JSON pointer.
    """
    _check("", "#", schema)


def _check(keyword: str, place: str, schema: Schema) -> Schema:
    if isinstance(schema, dict):
        for name, form in _FORMS.items():
            value = schema.get(name)
            if value is not None and not form.fits(value):
                raise ValueError(f"{place}/{name} must be {form.words}")
        changed(schema, place, _check)
    return schema


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _are_named_schemas(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_schema, value.values()))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_NAMED = _Form("an object whose values are schemas", _are_named_schemas)
_LISTED = _Form("an array of schemas", _are_schemas)
_COUNT = _Form("a number", is_number)
_FORMS: Mapping[str, _Form] = {
    "properties": _NAMED,
    "patternProperties": _NAMED,
    "additionalProperties": _Form("a schema", is_schema),
    "required": _Form("an array of strings", _are_texts),
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "allOf": _LISTED,
    "anyOf": _LISTED,
    "oneOf": _LISTED,
    "prefixItems": _LISTED,
    "items": _Form("a schema", lambda value: is_schema(value) or _are_schemas(value)),
}
