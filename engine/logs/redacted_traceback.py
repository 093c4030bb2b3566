"""What the log tells of an exception: types and places, but no message, which may quote a user."""

from __future__ import annotations

import traceback


def trace_of(error: object) -> str:
    """The exception's type and where it was raised, innermost last, and so for its causes."""
    lines: list[str] = []
    seen: set[int] = set()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        lines.append("\n  ".join([type(error).__name__, *places]))
        error = error.__cause__ or error.__context__
    return "\ncaused by ".join(lines) or "an unknown error"
