"""Server-sent events, read as they come in."""

from __future__ import annotations


class SSEParser:
    """Turns a byte stream, cut anywhere, into the data of its events.

    Comments (keep-alives) and the fields ``event``, ``id`` and ``retry`` are skipped; several
    data lines of one event are joined by newlines; lines may end with LF or CRLF.
    """

    __slots__ = ("_data", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that ``chunk`` completes, in order."""
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
