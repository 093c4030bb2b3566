"""Objects of a JSON schema to which properties could be added for ever: closed, or bounded.

A schema that does not say which properties an object may have allows any number of them, and a
small model writes one after the other until ``max_tokens``. All that fits a schema that comes out
of here fits the schema that went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.engine.grammar.names import other_names
from chairlift.engine.grammar.subschemas import (
    APPLYING,
    OF_PROPERTIES,
    Object,
    Schema,
    changed,
    combined,
    references,
)

# Properties that an object's schema does not mention: how many there may be beside the named ones,
# and how long their names and texts may be. Their values are neither objects nor arrays.
MAX_UNMENTIONED = 8
MAX_NAME_CHARS = 64
MAX_TEXT_CHARS = 256
# Entries of an object that is a map: its schema names none, or says what the others look like.
MAX_ENTRIES = 64
# Levels of objects and arrays in a value of which the schema says nothing.
MAX_FREE_DEPTH = 6
# Where more are optional, or names are longer, there are none beside them, nor in the objects of a
# schema after so many that have optional ones: the grammar would be too large.
MAX_OPTIONAL = 64
MAX_NAMED_CHARS = 2048
MAX_ALTERNATIVES = 64

_SCALARS = ["string", "number", "boolean", "null"]
_UNMENTIONED = {"type": _SCALARS, "maxLength": MAX_TEXT_CHARS}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"} | {
    "readOnly",
    "writeOnly",
}
_DEFINITIONS = ("$defs", "definitions")
# What definitions that are added are called; a number follows.
_ADDED = "x-chairlift-"


def closed(schema: Object) -> Object:
    """The same with ``additionalProperties: false`` in every object that names its properties.

    An object whose schema says what others it has stays as it is. So does one that several schemas
    describe together, in ``allOf`` or with ``$ref`` or ``anyOf`` beside ``properties``: were one of
    them closed, nothing would fit them all.
    """
    return _Closing(schema).result()


def bounded(schema: Object) -> Object:
    """The same with a limit on the number of properties of every object that has no limit.

    Objects that several schemas describe together stay as they are.
    """
    return _Bounding(schema).result()


class _Closing:
    """Rewrites a schema from its leaves to its root."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema
        self._combined = combined(schema)
        self._added: Object = {}

    def result(self) -> Object:
        """The whole schema."""
        schema = self._rewritten("", "#", self._schema)
        assert isinstance(schema, dict)
        if self._added:
            own = schema.get("$defs")
            schema["$defs"] = {**(own if isinstance(own, dict) else {}), **self._added}
        return schema

    def _rewritten(self, keyword: str, pointer: str, schema: Schema) -> Schema:
        if isinstance(schema, bool) or (keyword and "$id" in schema):
            return schema  # references below an $id are to what is there
        if pointer in self._combined or not APPLYING.isdisjoint(schema):
            return changed(schema, pointer, self._rewritten)
        if not _may_be_object(schema):
            return changed(schema, pointer, self._rewritten)
        return self._limited(changed(_all_named(schema), pointer, self._rewritten), pointer)

    def _limited(self, schema: Object, pointer: str) -> Object:
        if "properties" in schema and not _says_others(schema):
            return {**schema, "additionalProperties": False}
        return schema


class _Bounding(_Closing):
    """Rewrites a schema; values of which it says nothing become values with limits."""

    def __init__(self, schema: Object) -> None:
        super().__init__(schema)
        self._targets = set(references(schema))
        self._alternatives = 0

    def _rewritten(self, keyword: str, pointer: str, schema: Schema) -> Schema:
        applied = keyword in APPLYING or keyword in _DEFINITIONS or pointer in self._combined
        if not applied and keyword and _says_nothing(schema):
            notes = schema if isinstance(schema, dict) else {}
            return {**notes, "$ref": self._free(MAX_FREE_DEPTH)}
        rewritten = super()._rewritten(keyword, pointer, schema)
        if isinstance(rewritten, dict) and rewritten.get("type") == "array" and not applied:
            rewritten.setdefault("items", {"$ref": self._free(MAX_FREE_DEPTH)})
        return rewritten

    def _limited(self, schema: Object, pointer: str) -> Object:
        others: object = schema.get("additionalProperties", True)
        if "maxProperties" in schema or (others is False and "patternProperties" not in schema):
            return schema
        if schema.get("properties") and not _says_others(schema):
            if sum(map(len, schema["properties"])) > MAX_NAMED_CHARS:
                return {**schema, "additionalProperties": False}
            name = other_names(schema["properties"], MAX_NAME_CHARS)
            limits = {"patternProperties": {name: _UNMENTIONED}, "additionalProperties": False}
            return self._with_others(schema, limits, MAX_UNMENTIONED, pointer)
        if others is True:
            limits = {"additionalProperties": {"$ref": self._free(MAX_FREE_DEPTH)}}
            return self._with_others(schema, limits, MAX_ENTRIES, pointer)
        return self._with_others(schema, {}, MAX_ENTRIES, pointer)

    def _with_others(self, schema: Object, limits: Object, most: int, pointer: str) -> Object:
        """An object with its named properties and with ``most`` others, which ``limits`` describes.

        The library counts properties only where all those that are named are required. With
        optional ones it is either an object without others, or one with all that are named.
        """
        named = list(schema.get("properties", ()))
        optional = set(named) - set(schema.get("required", ()))
        least = schema.get("minProperties", 0)
        most = len(named) + max(most, least - len(named) if isinstance(least, int) else 0)
        if not optional:
            return {**schema, **limits, "maxProperties": most}
        alone = {k: v for k, v in schema.items() if k != "patternProperties"}
        alone["additionalProperties"] = False
        moved = any(target.startswith(f"{pointer}/properties/") for target in self._targets)
        self._alternatives += 1
        too_large = len(optional) > MAX_OPTIONAL or self._alternatives > MAX_ALTERNATIVES
        if moved or too_large or False in schema["properties"].values():
            return alone
        shared = {name: self._shared(one) for name, one in schema["properties"].items()}
        definitions = {k: alone.pop(k) for k in _DEFINITIONS if k in alone}
        whole = {k: v for k, v in schema.items() if k not in definitions}
        alone["properties"] = whole["properties"] = shared
        whole |= {"type": "object", **limits, "required": named, "maxProperties": most}
        return {**definitions, "anyOf": [alone, whole]}

    def _shared(self, schema: Schema) -> Schema:
        """The same schema, as a reference if it is long: it is needed twice."""
        if isinstance(schema, bool) or not any(isinstance(v, dict | list) for v in schema.values()):
            return schema
        if set(schema) == {"$ref"}:
            return schema
        return {"$ref": self._add(schema)}

    def _free(self, depth: int) -> str:
        """A reference to any JSON value of so many levels."""
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


def _says_others(schema: Object) -> bool:
    return "additionalProperties" in schema or "patternProperties" in schema


def _says_nothing(schema: Schema) -> bool:
    return schema is True or (isinstance(schema, dict) and _ANNOTATIONS.issuperset(schema))


def _may_be_object(schema: Object) -> bool:
    if "const" in schema or "enum" in schema:
        return False
    kind = schema.get("type")
    if kind is None:
        return not OF_PROPERTIES.isdisjoint(schema)
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _all_named(schema: Object) -> Object:
    """The same with a property for each name that is required: what the schema says of others."""
    named, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(named, dict) or not isinstance(required, Sequence) or not required:
        return schema
    unnamed = [name for name in required if isinstance(name, str) and name not in named]
    if not unnamed or "patternProperties" in schema:
        return schema
    others: Any = schema.get("additionalProperties", True)
    return {**schema, "properties": {**named, **dict.fromkeys(unnamed, others)}}
