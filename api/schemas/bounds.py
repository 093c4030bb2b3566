"""How much a body may hold: counted in linear time, before anything costly is done with it."""

from __future__ import annotations

import re
from typing import Any

# Objects in the lists of a body: messages, their parts and calls, tools.
MAX_PARTS = 16_384
# Entries of a list that has no smaller limit of its own.
MAX_ENTRIES = 4_096
# Values in the free-form objects of a body (schemas, a call's arguments), each and together.
MAX_OBJECT_VALUES = 65_536
MAX_VALUES = 262_144

# An escaped character may be a quotation mark.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def weight(body: bytes) -> int:
    """No fewer than a JSON text's values: its commas and opening brackets, also in strings."""
    return len(body) - len(body.translate(None, b",[{"))


def values_in(text: str, most: int) -> int:
    """As ``weight``, without what stands in strings if that matters to whether it is ``most``."""
    if (count := _marks(text)) > most:
        count = _marks(_STRING.sub("", text))
    return count


def values_of(value: object) -> int:
    """The values in dictionaries and lists, which are not nested deeply, itself included."""
    count = 1
    level = [value]
    while level:
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        count += len(inner)
        level = inner
    return count


def _marks(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def fail_fast(schema: Any) -> Any:
    """A pydantic core schema whose lists end at their first error, and have a limit each.

    A list of a million wrong parts is otherwise a million errors, each with its location.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            schema.setdefault("max_length", MAX_ENTRIES)
        for inner in schema.values():
            fail_fast(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            fail_fast(inner)
    return schema
