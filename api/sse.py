"""Server-sent events as OpenAI sends them: data lines of JSON, comments to keep alive, [DONE]."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from chairlift.api.errors import Problem

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx would collect the events otherwise.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One event stream reply, opened and closed by ``async with``.

    Writing raises ConnectionResetError once the client has left.
    """

    def __init__(self, request: web.Request, keep_alive_seconds: float) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._interval = keep_alive_seconds
        self._encode = msgspec.json.Encoder().encode
        self._last_write = 0.0

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._last_write = asyncio.get_running_loop().time()
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeper.cancel()

    async def send(self, chunks: Sequence[msgspec.Struct]) -> None:
        """Sends chunks in one write."""
        encode = self._encode
        await self._write(b"".join([b"data: %b\n\n" % encode(chunk) for chunk in chunks]))

    async def fail(self, problem: Problem) -> None:
        """Sends an error event."""
        await self._write(b"data: %b\n\n" % problem.body())

    async def finish(self) -> None:
        """Sends the last event and ends the reply."""
        await self._write(_DONE)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        self._last_write = asyncio.get_running_loop().time()
        await self.response.write(data)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._last_write
            if silent < self._interval:
                await asyncio.sleep(self._interval - silent)
                continue
            try:
                await self._write(_KEEP_ALIVE)
            except ConnectionResetError:
                return  # the handler is told by its own write, or cancelled
