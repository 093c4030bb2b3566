"""Ends a stream whose replica was lost with an error in the format of its API."""

from __future__ import annotations

import msgspec

from chairlift.api.anthropic.errors import ANTHROPIC_ERRORS
from chairlift.api.errors import ErrorFormat, Problem
from chairlift.api.http.sse import MESSAGES, NDJSON, PLAIN, RESPONSES, Framing, framed
from chairlift.api.responses.events import ErrorEvent

_DATA = b"\ndata:"
_RESPONSES = "/v1/responses"


class StreamTail:
    """Follows a stream of events or lines, to be able to append one."""

    def __init__(self, path: str, errors: ErrorFormat, content_type: str) -> None:
        self._path = path
        self._errors = errors
        self._is_lines = "ndjson" in content_type
        self._events = 0
        # A stream begins like a new line.
        self._tail = b"\n\n"

    def add(self, chunk: bytes) -> None:
        """Notes the next piece of the stream."""
        seen = self._tail[1 - len(_DATA) :] + chunk
        self._events += seen.count(_DATA)
        self._tail = seen[-len(_DATA) :]

    def failure(self, problem: Problem, request_id: str) -> bytes:
        """The bytes that end the stream with ``problem``."""
        framing, event = self._event(problem, request_id)
        gap = b"" if self._tail.endswith(b"\n\n") else b"\n\n"
        if self._is_lines:
            gap = b"" if self._tail.endswith(b"\n") else b"\n"
        return gap + b"".join(framed(framing, [event])) + framing.end

    def _event(self, problem: Problem, request_id: str) -> tuple[Framing, msgspec.Struct]:
        if self._path.startswith(_RESPONSES):
            event = ErrorEvent(
                sequence_number=self._events,
                message=problem.message,
                code=problem.code,
                param=problem.param,
            )
            return RESPONSES, event
        reply = self._errors.reply(problem, request_id)
        if self._is_lines:
            return NDJSON, reply
        return (MESSAGES if self._errors is ANTHROPIC_ERRORS else PLAIN), reply
