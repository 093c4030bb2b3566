"""Decodes the JSON that clients send, and finds values in it that no request may have.

Such values are lone surrogates, which are escapes such as ``\\ud800``, half of a character; numbers
that are too large, such as ``1e400`` and integers of more than 4,300 digits; and the constants NaN
and Infinity, which many libraries write although JSON has none. The decoder calls them syntax
errors and does not say where they are.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec

_BYTES_MARK = b"\xef\xbb\xbf"
_TEXT_MARK = "\ufeff"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# The path of a field contains the client's names, which may be long.
_MAX_PATH = 200
_INFINITY = float("inf")


class RefusedValue(ValueError):
    """A JSON text has a value that no request may have.

    Attributes:
        path: the field with the value, such as ``messages[0].content``; None: the text itself, or a
            name in it.
        document: the decoded text.
    """

    def __init__(self, reason: str, path: str | None, document: object) -> None:
        super().__init__(reason if path is None else f"{path}: {reason}")
        self.path = path
        self.document = document


class LoneSurrogate(RefusedValue):
    """A text in the JSON, or a name, has half of a character."""


class NotFinite(RefusedValue):
    """A number in the JSON is NaN, infinite, or too large."""


def without_mark(text: bytes) -> bytes:
    """The text without a byte order mark, which some editors and libraries write before it."""
    return text.removeprefix(_BYTES_MARK)


def decoded(text: bytes | str) -> Any:
    """Decodes JSON, with or without a byte order mark.

    Raises:
        RefusedValue: it has a lone surrogate, or a number that is too large or not finite.
        ValueError: it is not valid JSON, or nested too deeply; the message says which.
    """
    text = without_mark(text) if isinstance(text, bytes) else text.removeprefix(_TEXT_MARK)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        if refused := refused_value(text, error):
            raise refused from None
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dotted(location: tuple[int | str, ...]) -> str | None:
    """Formats ("messages", 0, "role") as messages[0].role, and () as None."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")[:_MAX_PATH] or None


def place_in(document: object, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of a pydantic error's location that is a path in the JSON ``document``.

    Pydantic adds the type of an object that may have one of several: of ``("tools", 0, "custom",
    "name")`` the third is none of the names in the object. The last may be a missing one.
    """
    if not location:
        return ()
    part, rest = location[0], location[1:]
    if isinstance(document, list) and isinstance(part, int) and part < len(document):
        return (part, *place_in(document[part], rest))
    if isinstance(document, dict) and isinstance(part, str):
        if part in document and (not rest or isinstance(document[part], dict | list)):
            return (part, *place_in(document[part], rest))
        if not rest:
            return (part,)
    return place_in(document, rest)


def refused_value(text: str | bytes, error: Exception) -> RefusedValue | None:
    """The first refused value in a JSON text that the decoder has refused with ``error``.

    None: it has none, or is invalid for another reason, too.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        # Most texts are invalid for other reasons: large ones are not parsed again.
        is_large = "out of range" in str(error)
        if not (is_large or _ESCAPE.search(text) or "NaN" in text or "Infinity" in text):
            return None
        document = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return _first_in(document)


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more than 4,300 digits, where the decoder stops, too
        return float(digits)


class _Place(NamedTuple):
    """A value's name or index in the value around it; the outermost value has no place."""

    outer: _Place | None
    name: int | str


def _first_in(document: object) -> RefusedValue | None:
    waiting: list[tuple[_Place | None, object]] = [(None, document)]
    while waiting:
        place, value = waiting.pop()
        texts: list[str] = []
        inner: list[tuple[int | str, object]] = []
        if isinstance(value, str):
            texts = [value]
        elif isinstance(value, list):
            inner = list(enumerate(value))
        elif isinstance(value, dict):
            texts, inner = list(value), list(value.items())
        # Unequal to itself is NaN only.
        elif isinstance(value, float) and not -_INFINITY < value < _INFINITY:
            reason = "must be a number between -1.8e308 and 1.8e308"
            return NotFinite(reason, _path(place), document)
        for text in texts:
            if found := _SURROGATE.search(text):
                reason = f"\\u{ord(found[0]):04x} is a lone surrogate, which is half of a character"
                return LoneSurrogate(reason, _path(place), document)
        waiting += [(_Place(place, name), one) for name, one in reversed(inner)]
    return None


def _path(place: _Place | None) -> str | None:
    location: list[int | str] = []
    while place is not None:
        location.append(place.name)
        place = place.outer
    return dotted(tuple(reversed(location)))
