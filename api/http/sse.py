"""Writes streams of JSON: server-sent events with keep-alives, or one object a line (NDJSON)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from chairlift.api.http.json_lines import one_line

logger = logging.getLogger(__name__)

_COMMENT = b": keep-alive\n\n"
# A client that does not read is checked at this interval for too much waiting output.
WATCH_SECONDS = 0.5
_encode = msgspec.json.Encoder().encode
_HEADERS = {
    "Cache-Control": "no-cache",
    # Otherwise nginx would buffer the events.
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Framing:
    """The format of an endpoint's stream.

    Attributes:
        named: whether each event has a name, its struct's tag.
        keep_alive: bytes sent into a silent stream.
        end: bytes sent after the last event.
        content_type: the stream's media type.
        event: the bytes of an event; ``%b`` stands for its JSON.
    """

    named: bool
    keep_alive: bytes = _COMMENT
    end: bytes = b""
    content_type: str = "text/event-stream; charset=utf-8"
    event: bytes = b"data: %b\n\n"


PLAIN = Framing(named=False, end=b"data: [DONE]\n\n")
RESPONSES = Framing(named=True)
MESSAGES = Framing(named=True, keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n')
# Clients parse every line, even an empty one; a space before the next object does no harm.
NDJSON = Framing(named=False, keep_alive=b" ", content_type="application/x-ndjson", event=b"%b\n")


def framed(framing: Framing, chunks: Sequence[msgspec.Struct]) -> list[bytes]:
    """The bytes of one event for each chunk."""
    events = [framing.event % one_line(_encode(chunk)) for chunk in chunks]
    if not framing.named:
        return events
    names = [str(chunk.__struct_config__.tag).encode() for chunk in chunks]
    return [b"event: %b\n%b" % named for named in zip(names, events, strict=True)]


class EventStream:
    """A reply that is a stream of events; ``async with`` begins it and stops its keep-alives.

    Writing raises ConnectionResetError after the client has left.

    Args:
        request: the request to reply to.
        framing: the format of the stream.
        keep_alive_seconds: the interval of keep-alives while nothing else is sent.
        is_too_slow: asked while the client does not read; if it returns true, the client is
            disconnected.
    """

    def __init__(
        self,
        request: web.Request,
        framing: Framing,
        keep_alive_seconds: float,
        is_too_slow: Callable[[], bool],
    ) -> None:
        self.response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": framing.content_type}
        )
        self._request = request
        self._framing = framing
        self._interval = keep_alive_seconds
        self._is_too_slow = is_too_slow
        self._clock = asyncio.get_running_loop().time
        self._last_write = 0.0

    def watch(self, is_too_slow: Callable[[], bool]) -> None:
        """Asks ``is_too_slow`` from now on; see the class."""
        self._is_too_slow = is_too_slow

    async def __aenter__(self) -> Self:
        """Begins the reply; does nothing if it has begun already."""
        if self.response.prepared:
            return self
        if self._request.version < HttpVersion11:
            # Only the end of the connection can tell such a client that the stream has ended.
            self.response.force_close()
        await self.response.prepare(self._request)
        self._last_write = self._clock()
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the keep-alives."""
        self._keeper.cancel()

    async def send_body(self, body: bytes, is_error: bool) -> None:
        """Sends JSON that was meant to be the whole reply, as one event."""
        name = b"event: error\n" if self._framing.named and is_error else b""
        await self._write(name + self._framing.event % one_line(body))

    async def send(self, chunks: Sequence[msgspec.Struct]) -> None:
        """Sends one event for each chunk, all in one write."""
        await self.send_framed(framed(self._framing, chunks))

    async def send_framed(self, events: Sequence[bytes]) -> None:
        """Sends the results of ``framed``, all in one write."""
        if events:
            await self._write(b"".join(events))

    async def finish(self) -> None:
        """Ends the reply."""
        if self._framing.end:
            await self._write(self._framing.end)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        self._last_write = self._clock()
        await self.response.write(data)

    async def _keep_alive(self) -> None:
        while True:
            silent = self._clock() - self._last_write
            await asyncio.sleep(min(max(0.0, self._interval - silent), WATCH_SECONDS))
            if self._request.protocol.writing_paused:
                if self._is_too_slow():
                    self._cut_off()
                continue
            if self._clock() - self._last_write < self._interval:
                continue
            try:
                await self._write(self._framing.keep_alive)
            except ConnectionResetError:
                return  # the handler's next write fails, or the handler is cancelled

    def _cut_off(self) -> None:
        if (transport := self._request.transport) is not None:
            logger.info("cut off a client that does not read what it asked for")
            transport.abort()
