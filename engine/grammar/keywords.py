"""Removes keywords without effect from JSON schemas: the grammar library refuses some by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chairlift.engine.grammar.form import check_form
from chairlift.engine.grammar.references import with_definitions
from chairlift.engine.grammar.subschemas import Object, Schema, changed, is_number

# Keywords that only describe a schema, also OpenAPI's.
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "contentEncoding", "contentMediaType", "contentSchema"}
    | {"example", "externalDocs", "nullable", "xml"}
)
# The formats that JSON Schema defines. The library refuses those that it cannot enforce; others,
# such as OpenAPI's int32 and password, are notes.
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname"}
    | {"ipv4", "ipv6", "uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid"}
    | {"json-pointer", "relative-json-pointer", "regex"}
)
# Keywords whose value is a whole number, which JSON Schema also allows to be written as 1.0.
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
# Inclusive and exclusive bound of numbers on one side, those of the other side, and this side's
# sign.
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SIDES = ((_LOWER, _UPPER, 1), (_UPPER, _LOWER, -1))
# The distance of an inclusive bound that replaces an exclusive one, and the largest number with
# that precision.
_GAP = 1e-9
_MAX_BOUND = 1e6
# The farthest bounds from 0 that the library takes, of whole numbers above 0 and of all others.
_FARTHEST_WHOLE = 2**63 - 1
_FARTHEST = 2**63 - 1024


def effective(schema: Object) -> Object:
    """A copy without keywords that allow all values that the schema allows without them.

    A keyword that is null, which many libraries write for one that is not set, counts as absent,
    except ``const``. All places that references point to become definitions.

    Raises:
        ValueError: see ``check_form``.
    """
    check_form(schema)
    whole = with_definitions(schema)
    if whole is not schema:
        check_form(whole)  # also places that were no schemas by themselves
    return _effective(whole)


def _effective(schema: Object) -> Object:
    whole = {
        keyword: int(value)
        if keyword in _COUNTS and isinstance(value, float) and value.is_integer()
        else value
        for keyword, value in schema.items()
        if value is not None or keyword == "const"
    }
    kept = {
        keyword: value
        for keyword, value in whole.items()
        if (is_idle := _IDLE.get(keyword)) is None or not is_idle(value, whole)
    }
    return changed(_with_exact_bounds(_with_near_bounds(kept)), "", _inner)


def _with_near_bounds(schema: Object) -> Object:
    """The schema with closer bounds in place of those that the library refuses, such as 1e308."""
    highest = _FARTHEST_WHOLE if schema.get("type") == "integer" else _FARTHEST
    near = {name: min(schema[name], highest) for name in _UPPER if is_number(schema.get(name))}
    near |= {name: max(schema[name], -_FARTHEST) for name in _LOWER if is_number(schema.get(name))}
    return {**schema, **near}


def _with_exact_bounds(schema: Object) -> Object:
    """The schema without the exclusive bounds that the library takes for inclusive ones.

    Those are whole numbers less than 1 from the other bound, which is further from 0.
    """
    for (inclusive, exclusive), others, sign in _SIDES:
        at = schema.get(exclusive)
        given = schema.get(inclusive)
        if at is True:  # JSON Schema's draft 4
            at = given
        far = [sign * schema[other] for other in others if is_number(schema.get(other))]
        if not (far and is_number(at) and 0 <= sign * at <= _MAX_BOUND and at == int(at)):
            continue
        if min(far) < sign * at + 1:
            nearest = max(sign * at + _GAP, sign * given if is_number(given) else 0)
            schema = {k: v for k, v in schema.items() if k != exclusive}
            schema[inclusive] = sign * nearest
    return schema


def says_nothing(schema: object) -> bool:
    """Whether a schema allows all values and only has notes."""
    return schema is True or (isinstance(schema, dict) and _NOTES.issuperset(schema))


def _inner(keyword: str, pointer: str, schema: Schema) -> Schema:
    return schema if isinstance(schema, bool) else _effective(schema)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_optional(schema: Object) -> bool:
    """Whether ``contains`` allows an array without such an item, and with any number of them."""
    minimum = schema.get("minContains")
    return _is_count(minimum) and minimum == 0 and "maxContains" not in schema


def _names_any_text(names: object) -> bool:
    # All names are strings.
    without_type = (
        {k: v for k, v in names.items() if k != "type"} if isinstance(names, dict) else {}
    )
    return says_nothing(names) or (
        isinstance(names, dict) and names.get("type") == "string" and says_nothing(without_type)
    )


def _depends_on_nothing(value: object, schema: Object) -> bool:
    return isinstance(value, dict) and all(
        needed == [] or says_nothing(needed) for needed in value.values()
    )


def _is_below_required(minimum: Any, schema: Object) -> bool:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return False
    return _is_count(minimum) and minimum <= len(set(required))


def _is_above_named(maximum: Any, schema: Object) -> bool:
    named = schema.get("properties", {})
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        return False
    return _is_count(maximum) and isinstance(named, dict) and maximum >= len(named)


# Whether a keyword has no effect, by its value and the schema that contains it.
_IDLE: Mapping[str, Callable[[Any, Object], bool]] = {
    "uniqueItems": lambda value, schema: value is False,
    "contains": lambda value, schema: _is_optional(schema),
    "minContains": lambda value, schema: "contains" not in schema or _is_optional(schema),
    "maxContains": lambda value, schema: "contains" not in schema,
    "dependentRequired": _depends_on_nothing,
    "dependentSchemas": _depends_on_nothing,
    "dependencies": _depends_on_nothing,
    "propertyNames": lambda value, schema: _names_any_text(value),
    "unevaluatedItems": lambda value, schema: says_nothing(value),
    "unevaluatedProperties": lambda value, schema: says_nothing(value),
    "not": lambda value, schema: value is False,
    "patternProperties": lambda value, schema: value == {},
    "required": lambda value, schema: value == [],
    "if": lambda value, schema: all(
        says_nothing(schema.get(branch, True)) for branch in ("then", "else")
    ),
    "then": lambda value, schema: "if" not in schema or says_nothing(value),
    "else": lambda value, schema: "if" not in schema or says_nothing(value),
    "minProperties": _is_below_required,
    "maxProperties": _is_above_named,
    "format": lambda value, schema: isinstance(value, str) and value not in _FORMATS,
    # Only $dynamicRef and $recursiveRef use them, which the library refuses.
    "$dynamicAnchor": lambda value, schema: True,
    "$recursiveAnchor": lambda value, schema: True,
}
