"""Tracebacks for the log: types and places without messages, because these may quote a user."""

from __future__ import annotations

import traceback


def redacted_traceback(error: object) -> str:
    """The types and the frames (innermost last) of an exception and of its causes."""
    lines: list[str] = []
    seen: set[int] = set()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        lines.append("\n  ".join([type(error).__name__, *places]))
        error = error.__cause__ or error.__context__
    return "\ncaused by ".join(lines) or "an unknown error"
