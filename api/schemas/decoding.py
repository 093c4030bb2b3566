"""Finds lone surrogates in JSON: escapes such as ``\\ud800``, which are half of a character.

JSON's grammar allows them, but no text may contain them, so the decoder reports a syntax error.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")
# The path of a field contains the client's names, which may be long.
_MAX_PATH = 200


class LoneSurrogate(ValueError):
    """A JSON text has a lone surrogate.

    Attributes:
        path: the field whose value has it, such as ``messages[0].content``; None: the text itself,
            or a name in it.
    """

    def __init__(self, escape: str, path: str | None) -> None:
        place = "" if path is None else f"{path}: "
        super().__init__(f"{place}{escape} is a lone surrogate, which is half of a character")
        self.path = path


def dotted(location: tuple[int | str, ...]) -> str | None:
    """Formats ("messages", 0, "role") as messages[0].role, and () as None."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")[:_MAX_PATH] or None


def find_lone_surrogate(text: str | bytes) -> LoneSurrogate | None:
    """The first lone surrogate in a JSON text that the decoder has refused.

    None: it has none, or is invalid for another reason, too.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        if not _ESCAPE.search(text):
            return None
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _first_in(value)


class _Place(NamedTuple):
    """A value's name or index in the value around it; the outermost value has no place."""

    outer: _Place | None
    name: int | str


def _first_in(value: object) -> LoneSurrogate | None:
    waiting: list[tuple[_Place | None, object]] = [(None, value)]
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
        for text in texts:
            if found := _LONE.search(text):
                return LoneSurrogate(f"\\u{ord(found[0]):04x}", _path(place))
        waiting += [(_Place(place, name), one) for name, one in reversed(inner)]
    return None


def _path(place: _Place | None) -> str | None:
    location: list[int | str] = []
    while place is not None:
        location.append(place.name)
        place = place.outer
    return dotted(tuple(reversed(location)))
