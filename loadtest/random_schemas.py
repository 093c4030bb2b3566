"""Generates random JSON schemas with all features of structured output and replies of bounded size.

Strings, names and arrays are bounded and no schema is recursive: small models repeat whatever a
schema lets them repeat, and their replies would never end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 4
_PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)$", "^[a-z]+(_[a-z]+)?$", "^#[0-9a-f]{6}$")
_FORMATS = ("date", "email", "ipv4", "uuid")
_WORDS = ("name", "size", "kind", "parts", "owner", "count", "price", "note", "tags", "next", "id")


def random_schema(rng: random.Random) -> Schema:
    """The schema of an object, with definitions that its parts refer to."""
    build = _Builder(rng)
    schema = build.object(MAX_DEPTH)
    if build.definitions:
        schema["$defs"] = build.definitions
    return schema


class _Builder:
    """Builds one schema and the definitions that it needs."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Schema] = {}

    def object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(_WORDS, rng.randint(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": sorted(rng.sample(names, rng.randint(0, len(names)))),
            "additionalProperties": False,
        }
        if rng.random() < 0.15:
            schema["required"] = names
            schema["patternProperties"] = {"^[A-Z]{1,6}$": self._leaf()}
            schema["maxProperties"] = len(names) + 2
        return schema

    def _any(self, depth: int) -> Schema:
        if depth <= 0 or self._rng.random() < 0.45:
            return self._leaf()
        build: Callable[[int], Schema] = self._rng.choice(
            [self.object, self._array, self._tuple, self._any_of, self._all_of, self._ref]
        )
        return build(depth)

    def _array(self, depth: int) -> Schema:
        min_items = self._rng.randint(0, 2)
        max_items = min_items + self._rng.randint(0, 3)
        return {
            "type": "array",
            "items": self._any(depth - 1),
            "minItems": min_items,
            "maxItems": max_items,
        }

    def _tuple(self, depth: int) -> Schema:
        count = self._rng.randint(1, 3)
        return {
            "type": "array",
            "prefixItems": [self._any(depth - 1) for _ in range(count)],
            "items": False,
            "minItems": count,
        }

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._rng.randint(2, 3))]}

    def _all_of(self, depth: int) -> Schema:
        schema = self.object(depth)
        return {"allOf": [schema, {"required": schema["required"]}]}

    def _ref(self, depth: int) -> Schema:
        """A reference to a definition, which may be new."""
        if not self.definitions or self._rng.random() < 0.7:
            definition = self._any(depth - 1)
            self.definitions[f"thing{len(self.definitions)}"] = definition
        return {"$ref": f"#/$defs/{self._rng.choice(list(self.definitions))}"}

    def _leaf(self) -> Schema:
        build: Callable[[], Schema] = self._rng.choice(
            [self._string, self._string, self._integer, self._number, self._enum, self._plain]
        )
        return build()

    def _string(self) -> Schema:
        rng = self._rng
        match rng.randrange(3):
            case 0:
                return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 16}
            case 1:
                return {"type": "string", "format": rng.choice(_FORMATS), "maxLength": 40}
        shortest = rng.randint(0, 4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 12)}

    def _integer(self) -> Schema:
        minimum = self._rng.randint(-1000, 1000)
        schema: Schema = {"type": "integer", "minimum": minimum, "maximum": minimum + 2000}
        if self._rng.random() < 0.3:
            schema |= {"minimum": 0, "multipleOf": self._rng.choice([2, 5, 10])}
        return schema

    def _number(self) -> Schema:
        schema: Schema = {"type": "number", "minimum": 0, "maximum": self._rng.randint(1, 100)}
        if self._rng.random() < 0.7:
            schema["multipleOf"] = 0.5
        return schema

    def _enum(self) -> Schema:
        values = self._rng.sample(["a", "long one", "\u00fc\u20ac", 1, 2.5, True, None], 3)
        return self._rng.choice([{"enum": values}, {"const": values[0]}])

    def _plain(self) -> Schema:
        return self._rng.choice([{"type": "boolean"}, _NULL, {"type": ["boolean", "null"]}])


_NULL: Schema = {"type": "null"}
