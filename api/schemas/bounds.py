"""Limits on the content of a body, checked in linear time before expensive work."""

from __future__ import annotations

import re
from typing import Any

# Objects in the lists of a body: messages, their parts and calls, tools.
MAX_PARTS = 16_384
# Entries of a list without a smaller limit.
MAX_ENTRIES = 4_096
# Values in one free-form object of a body (a schema, a call's arguments), and in all together.
MAX_OBJECT_VALUES = 65_536
MAX_VALUES = 262_144

# A JSON string; an escaped character may be a quotation mark.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def weight(body: bytes) -> int:
    """An upper bound of the values in a JSON text: its commas and opening brackets.

    It also counts the ones inside strings.
    """
    return len(body) - len(body.translate(None, b",[{"))


def values_in(text: str, limit: int) -> int:
    """Like ``weight``, but ignores strings if the count would otherwise exceed ``limit``."""
    if (count := _marks(text)) > limit:
        count = _marks(_STRING.sub("", text))
    return count


def values_of(value: object) -> int:
    """The number of values in ``value``, including itself; it must not be nested deeply."""
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
    """Changes a pydantic core schema: each list stops at its first error and has a maximum length.

    Otherwise a list of a million invalid parts would produce a million errors.
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
