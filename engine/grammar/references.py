"""Moves the schemas that references point to into a JSON schema's definitions.

A reference may point to any place of the schema around it, such as ``#/properties/a``, also to one
that is no schema by itself, such as ``#/components/schemas/a``. The other modules rewrite schemas
place by place, and regard only definitions as places that references point to.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from chairlift.engine.grammar.subschemas import Object, Schema, changed

# The prefix of the names of added definitions.
_ADDED = "x-chairlift-place-"
# The whole schema, and its definitions.
_KEPT = re.compile(r"#|#/(\$defs|definitions)/[^/]+")
_INDEX = re.compile(r"[0-9]{1,6}")


def with_definitions(schema: Object) -> Object:
    """A schema of the same meaning whose references point to itself or to its definitions.

    References to nothing stay as they are, and so do those below an ``$id``, which point to schemas
    below it.
    """
    return _Moving(schema).result()


class _Moving:
    """Replaces each referenced schema by a reference to a definition with its content."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema
        self._seen: set[str] = set()
        # The referenced schemas, by their places.
        self._targets: dict[str, Schema] = {}
        self._find("", "#", schema)
        # A place that is no schema by itself may have references, too.
        waiting = list(self._targets)
        while waiting:
            place = waiting.pop()
            known = len(self._targets)
            self._find("$ref", place, self._targets[place])
            waiting += list(self._targets)[known:]
        self._names = {place: f"{_ADDED}{n}" for n, place in enumerate(self._targets)}

    def result(self) -> Object:
        """The schema with all definitions."""
        if not self._targets:
            return self._schema
        schema = self._rewritten("", "#", self._schema)
        assert isinstance(schema, dict)
        given = schema.get("$defs")
        added: Object = {
            self._names[place]: self._rewritten("$defs", place, target)
            for place, target in self._targets.items()
        }
        return {**schema, "$defs": {**(given if isinstance(given, dict) else {}), **added}}

    def _find(self, keyword: str, place: str, schema: Schema) -> Schema:
        if place in self._seen or isinstance(schema, bool) or (keyword and "$id" in schema):
            return schema
        self._seen.add(place)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = unquote(reference)
            if not _KEPT.fullmatch(target) and target not in self._targets:
                found = _at(target, self._schema)
                if isinstance(found, dict | bool):
                    self._targets[target] = found
        changed(schema, place, self._find)
        return schema

    def _rewritten(self, keyword: str, place: str, schema: Schema) -> Schema:
        if isinstance(schema, bool) or (keyword and "$id" in schema):
            return schema
        copy = changed(schema, place, self._replaced)
        reference = copy.get("$ref")
        if isinstance(reference, str) and (name := self._names.get(unquote(reference))):
            copy["$ref"] = f"#/$defs/{name}"
        return copy

    def _replaced(self, keyword: str, place: str, schema: Schema) -> Schema:
        if name := self._names.get(place):
            return {"$ref": f"#/$defs/{name}"}
        return self._rewritten(keyword, place, schema)


def _at(pointer: str, schema: Object) -> object:
    """The value at a JSON pointer in a schema; None if there is none."""
    first, *names = pointer.split("/")
    value: object = schema if first == "#" else None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
