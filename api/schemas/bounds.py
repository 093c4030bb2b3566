"""Limits on the content of a body, checked in linear time before expensive work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import core_schema

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


def bounded(schema: Any) -> Any:
    """Changes a pydantic core schema, in which others that were changed before may be nested.

    Each list stops at its first error and has a maximum length: a list of a million invalid parts
    would otherwise produce a million errors. The error of a number says which numbers are allowed.
    """
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "list":
            schema["fail_fast"] = True
            schema.setdefault("max_length", MAX_ENTRIES)
        if kind in ("int", "float"):
            number = dict(schema)
            schema.clear()
            schema.update(
                core_schema.custom_error_schema(
                    number, custom_error_type="number", custom_error_message=_allowed(number)
                )
            )
        elif kind != "custom-error":
            for inner in schema.values():
                bounded(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            bounded(inner)
    return schema


def _allowed(number: Mapping[str, Any]) -> str:
    """The numbers that the core schema of a number allows, in words."""
    if number["type"] == "int":
        least = number["gt"] + 1 if "gt" in number else number.get("ge")
        most = number["lt"] - 1 if "lt" in number else number.get("le")
        if least is None or most is None:
            return "must be an integer"
        return f"must be an integer from {least} to {most}"
    if "ge" in number and "le" in number:
        return f"must be a number from {number['ge']:g} to {number['le']:g}"
    if "gt" in number and "le" in number:
        return f"must be a number above {number['gt']:g} and at most {number['le']:g}"
    return "must be a number"
