"""Handles the text of a JSON object that arrives in pieces or was cut."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from pydantic_core import from_json

_MARKS = re.compile(r'["\\{}\[\]\n]')
_LAST_NUMBER = re.compile(r"[-+.0-9eE]+\Z")


class ObjectText:
    """Scans the text of one JSON object up to its closing brace.

    Attributes:
        in_string: whether the text so far ends inside a string.
        has_line_break: whether a string contains a line break, which JSON does not allow. Either
            its quotation mark is missing, or the line break is not escaped.
        ended: whether the object is complete.
    """

    def __init__(self) -> None:
        self.in_string = False
        self.has_line_break = False
        self.ended = False
        self._depth = 0
        self._escaped = False

    def add(self, text: str) -> str:
        """Takes the next piece of text; returns the part that belongs to the object."""
        if self.ended or not text:
            return ""
        at, self._escaped = int(self._escaped), False
        while mark := _MARKS.search(text, at):
            at = mark.end()
            if self.in_string:
                self.in_string = mark[0] != '"'
                self.has_line_break |= mark[0] == "\n"
                if mark[0] == "\\":
                    self._escaped = at == len(text)
                    at += 1
            elif mark[0] == '"':
                self.in_string = True
            elif mark[0] in "{[":
                self._depth += 1
            elif mark[0] in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return text[:at]
        return text


def is_complete_object(text: str) -> bool:
    """Whether ``text`` is a complete JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def partial_object(beginning: str) -> dict[str, Any]:
    """Parses the beginning of an object: its complete values, and the beginning of a cut string.

    A number at the end is dropped, because digits may be missing. Returns an empty object if
    nothing can be parsed.
    """
    scan = ObjectText()
    scan.add(beginning)
    if not scan.in_string:
        beginning = _LAST_NUMBER.sub("", beginning)
    try:
        found = from_json(beginning, allow_partial="trailing-strings")
    except ValueError:  # nested too deeply, or half a surrogate pair
        return {}
    return found if isinstance(found, dict) else {}
