"""Rewrites JSON schemas so that no object allows an unlimited number of properties.

A schema that does not say which properties an object may have allows any number of them, and a
small model writes one after the other until ``max_tokens``. ``closed`` forbids unmentioned
properties, ``bounded`` limits their number. A value that fits the result also fits the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.engine.grammar.keywords import effective, says_nothing
from chairlift.engine.grammar.names import other_names
from chairlift.engine.grammar.patterns import apart, with_applied_patterns
from chairlift.engine.grammar.subschemas import (
    APPLYING,
    OF_PROPERTIES,
    Object,
    Schema,
    changed,
    combined,
    combines,
)

# Limits of unmentioned properties, which an object may have beside the named ones: their number,
# and the length of their names and texts. Their values are neither objects nor arrays.
MAX_UNMENTIONED = 8
MAX_NAME_CHARS = 64
MAX_TEXT_CHARS = 256
# Properties of an object that is a map: its schema names none, or describes unmentioned ones.
MAX_ENTRIES = 64
# Levels of objects and arrays in a value that the schema does not describe.
MAX_FREE_DEPTH = 6
# To keep the grammar small, an object gets no unmentioned properties if more named ones than this
# are optional, if the names are longer in total, or if this many objects with optional properties
# come before it in the schema.
MAX_OPTIONAL = 64
MAX_NAMED_CHARS = 2048
MAX_ALTERNATIVES = 64

_SCALARS = ["string", "number", "boolean", "null"]
_UNMENTIONED = {"type": _SCALARS, "maxLength": MAX_TEXT_CHARS}
_DEFINITIONS = ("$defs", "definitions")
# The prefix of the names of added definitions.
_ADDED = "x-chairlift-"


def closed(schema: Object) -> Object:
    """Adds ``additionalProperties: false`` to every object that names its properties.

    Two kinds of objects do not change: those whose schema describes unmentioned properties, and
    those that several schemas describe together, in ``allOf`` or with ``$ref`` or ``anyOf`` beside
    ``properties``, with all that is in them. If one of these were closed, no value might fit all
    of its schemas. Keywords without effect are left out.

    Raises:
        ValueError: see ``check_form``.
    """
    return _Closing(effective(schema)).result()


def bounded(schema: Object) -> Object:
    """Limits the number of properties of every object that has no limit.

    Objects that several schemas describe together do not change. Keywords without effect are left
    out. Patterns apply to named properties, too; see ``with_applied_patterns``.

    Raises:
        ValueError: see ``check_form``.
    """
    return with_applied_patterns(_Bounding(effective(schema)).result(), _matches_no_name)


def unbounded(schema: Object) -> Object:
    """As ``bounded``, but without limits."""
    return with_applied_patterns(effective(schema), _matches_no_name)


class _Closing:
    """Rewrites a schema from its leaves to its root."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema
        self._combined = combined(schema)
        self._added: Object = {}

    def result(self) -> Object:
        """The rewritten schema."""
        schema = self._rewritten("", "#", self._schema)
        assert isinstance(schema, dict)
        if self._added:
            given = schema.get("$defs")
            schema["$defs"] = {**(given if isinstance(given, dict) else {}), **self._added}
        return schema

    def _rewritten(self, keyword: str, pointer: str, schema: Schema) -> Schema:
        if isinstance(schema, bool) or (keyword and "$id" in schema):
            return schema  # references below an $id point to schemas below it
        if pointer in self._combined or combines(schema):
            # Their properties, too, may be described by several schemas.
            return changed(schema, pointer, self._rewritten_definition)
        if not APPLYING.isdisjoint(schema):
            return changed(schema, pointer, self._rewritten)
        if not _may_be_object(schema):
            return changed(schema, pointer, self._rewritten)
        return self._limited(changed(_all_named(schema), pointer, self._rewritten))

    def _rewritten_definition(self, keyword: str, pointer: str, schema: Schema) -> Schema:
        return self._rewritten(keyword, pointer, schema) if keyword in _DEFINITIONS else schema

    def _limited(self, schema: Object) -> Object:
        if "properties" in schema and not _says_others(schema):
            return {**schema, "additionalProperties": False}
        return schema


class _Bounding(_Closing):
    """Also limits values that the schema does not describe."""

    def __init__(self, schema: Object) -> None:
        super().__init__(schema)
        self._alternatives = 0

    def _rewritten(self, keyword: str, pointer: str, schema: Schema) -> Schema:
        applied = keyword in APPLYING or keyword in _DEFINITIONS or pointer in self._combined
        if not applied and keyword and says_nothing(schema):
            notes = schema if isinstance(schema, dict) else {}
            return {**notes, "$ref": self._free(MAX_FREE_DEPTH)}
        rewritten = super()._rewritten(keyword, pointer, schema)
        if isinstance(rewritten, dict) and rewritten.get("type") == "array" and not applied:
            rewritten.setdefault("items", {"$ref": self._free(MAX_FREE_DEPTH)})
        return rewritten

    def _limited(self, schema: Object) -> Object:
        if (separated := apart(schema, says_nothing)) is not schema:
            patterns = separated.pop("allOf")
            return {**self._limited(separated), "allOf": patterns}
        others: object = schema.get("additionalProperties", True)
        if "maxProperties" in schema or (others is False and "patternProperties" not in schema):
            return schema
        if schema.get("properties") and not _says_others(schema):
            if sum(map(len, schema["properties"])) > MAX_NAMED_CHARS:
                return {**schema, "additionalProperties": False}
            name = other_names(schema["properties"], MAX_NAME_CHARS)
            limits = {"patternProperties": {name: _UNMENTIONED}, "additionalProperties": False}
            return self._with_others(schema, limits, MAX_UNMENTIONED)
        if others is True:
            limits = {"additionalProperties": {"$ref": self._free(MAX_FREE_DEPTH)}}
            return self._with_others(schema, limits, MAX_ENTRIES)
        return self._with_others(schema, {}, MAX_ENTRIES)

    def _with_others(self, schema: Object, limits: Object, others: int) -> Object:
        """An object with its named properties and up to ``others`` more, described by ``limits``.

        The library counts properties only if all named ones are required. If some are optional, the
        result has two alternatives: no unmentioned properties, or all the named ones.
        """
        named = list(schema.get("properties", ()))
        optional = set(named) - set(schema.get("required", ()))
        minimum = schema.get("minProperties", 0)
        maximum = len(named) + max(others, minimum - len(named) if isinstance(minimum, int) else 0)
        if not optional:
            return {**schema, **limits, "maxProperties": maximum}
        only_named = {k: v for k, v in schema.items() if k != "patternProperties"}
        only_named["additionalProperties"] = False
        self._alternatives += 1
        too_large = len(optional) > MAX_OPTIONAL or self._alternatives > MAX_ALTERNATIVES
        if too_large or False in schema["properties"].values():
            return only_named
        shared = {name: self._shared(one) for name, one in schema["properties"].items()}
        definitions = {k: only_named.pop(k) for k in _DEFINITIONS if k in only_named}
        with_others = {k: v for k, v in schema.items() if k not in definitions}
        only_named["properties"] = with_others["properties"] = shared
        required = list(dict.fromkeys([*named, *schema.get("required", ())]))
        with_others |= {"type": "object", **limits, "required": required, "maxProperties": maximum}
        return {**definitions, "anyOf": [only_named, with_others]}

    def _shared(self, schema: Schema) -> Schema:
        """The schema, or a reference to it if it is long, because it is used twice."""
        if isinstance(schema, bool) or not any(isinstance(v, dict | list) for v in schema.values()):
            return schema
        if set(schema) == {"$ref"}:
            return schema
        return {"$ref": self._add(schema)}

    def _free(self, depth: int) -> str:
        """A reference to the schema of any JSON value with up to ``depth`` levels."""
        name = f"{_ADDED}any-{depth}"
        if name not in self._added:
            kinds: list[Object] = [{"type": _SCALARS}]
            if depth:
                inner = {"$ref": self._free(depth - 1)}
                kinds.append({"type": "array", "items": inner})
                kinds.append(
                    {"type": "object", "additionalProperties": inner, "maxProperties": MAX_ENTRIES}
                )
            self._added[name] = {"anyOf": kinds} if depth else kinds[0]
        return f"#/$defs/{name}"

    def _add(self, schema: Schema) -> str:
        name = f"{_ADDED}{len(self._added)}"
        self._added[name] = schema
        return f"#/$defs/{name}"


def _matches_no_name(schema: Schema) -> bool:
    """Whether a pattern with this schema was added here, or says nothing about what it matches."""
    return schema is _UNMENTIONED or says_nothing(schema)


def _says_others(schema: Object) -> bool:
    return "additionalProperties" in schema or "patternProperties" in schema


def _may_be_object(schema: Object) -> bool:
    if "const" in schema or "enum" in schema:
        return False
    kind = schema.get("type")
    if kind is None:
        return not OF_PROPERTIES.isdisjoint(schema)
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _all_named(schema: Object) -> Object:
    """Adds each required but unmentioned property, described as the schema describes others."""
    named, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(named, dict) or not isinstance(required, Sequence) or not required:
        return schema
    unnamed = [name for name in required if isinstance(name, str) and name not in named]
    if not unnamed or "patternProperties" in schema:
        return schema
    others: Any = schema.get("additionalProperties", True)
    return {**schema, "properties": {**named, **dict.fromkeys(unnamed, others)}}
