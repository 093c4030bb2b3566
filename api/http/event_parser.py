"""A streaming parser of server-sent events."""

from __future__ import annotations


class SSEParser:
    """Extracts the data of events from a byte stream that arrives in arbitrary chunks.

    It skips comments (keep-alives) and the fields ``event``, ``id`` and ``retry``, and joins the
    data lines of one event with newlines. Lines may end with LF or CRLF.
    """

    __slots__ = ("_data", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the data of the events that ``chunk`` completes, in order."""
        lines = (self._tail + chunk).split(b"\n")
        self._tail = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
