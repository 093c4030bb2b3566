"""Limits on the content of a body, checked in linear time before expensive work."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
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


def bounded(schema: Any, is_item: bool = False) -> Any:
    """Changes a pydantic core schema, in which others that were changed before may be nested.

    Each list stops at its first error and has a maximum length: a list of a million invalid parts
    would otherwise produce a million errors. The error of a number says which numbers are allowed,
    and that of a field with several types says which. An integer may be written as 5.0, except in a
    list (``is_item``), which may be too long for a check in Python.
    """
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "custom-error":
            return schema
        if kind == "list":
            schema["fail_fast"] = True
            schema.setdefault("max_length", MAX_ENTRIES)
        for name, inner in schema.items():
            bounded(inner, name == "items_schema")
        if (message := _allowed(schema)) is not None:
            own = dict(schema)
            schema.clear()
            if kind == "int" and not is_item:
                own = dict(core_schema.no_info_before_validator_function(_as_integer, own))
            schema |= core_schema.custom_error_schema(
                own, custom_error_type="not_allowed", custom_error_message=message
            )
    elif isinstance(schema, list | tuple):
        for inner in schema:
            bounded(inner)
    return schema


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _allowed(schema: Mapping[str, Any]) -> str | None:
    """Describes the values that a core schema allows, as the end of an error's sentence.

    None for schemas other than those of numbers and of several types.
    """
    match schema:
        case {"type": "int"}:
            least = schema["gt"] + 1 if "gt" in schema else schema.get("ge")
            most = schema["lt"] - 1 if "lt" in schema else schema.get("le")
            if least is None or most is None:
                return "must be an integer"
            return f"must be an integer from {least} to {most}"
        case {"type": "float", "ge": least, "le": most}:
            return f"must be a number from {least:g} to {most:g}"
        case {"type": "float", "gt": least, "le": most}:
            return f"must be a number above {least:g} and at most {most:g}"
        case {"type": "float"}:
            return "must be a number"
        case {"type": "union", "choices": choices}:
            names = [_names(choice) for choice in choices if isinstance(choice, dict)]
            if len(names) == len(choices) and all(names):
                *first, last = chain.from_iterable(names)
                return f"must be {', '.join(first)} or {last}"
    return None


def _names(choice: Mapping[str, Any]) -> Sequence[str]:
    """The values that the core schema of one of several types allows; empty if it has no name."""
    match choice:
        case {"type": "bool"}:
            return "true", "false"
        case {"type": "str"}:
            return ("a string",)
        case {"type": "list", "items_schema": {"type": "str"}}:
            return ("a list of strings",)
        case {"type": "literal", "expected": expected}:
            return [json.dumps(value) for value in expected]
    return ()
