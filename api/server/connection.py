"""A client's connection, with the limits and errors that aiohttp's lacks.

Malformed HTTP and connections beyond the limit get an error reply, and a client that does not read
is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.http_parser import RawRequestMessage

from chairlift.api.errors import Problem
from chairlift.engine.logs.redacted_traceback import redacted_traceback

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1


class Connection(web.RequestHandler):
    """aiohttp's connection with limits on unread data and on the number of connections.

    Sent data waits in the transport while the client does not read. Once more than the transport's
    high-water mark (64 KiB) waits, the client has ``slow_reader_seconds`` to read most of it.

    Args:
        server: aiohttp's server.
        loop: the event loop.
        slow_reader_seconds: the time after which a client that does not read is disconnected.
        max_files: connections whose file number is this or more are refused. The numbers above are
            reserved for the process's other files; see ``listen``.
        on_rejected: called with "malformed" or "connections" when a connection is rejected.
        options: passed to aiohttp's RequestHandler.
    """

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        slow_reader_seconds: float,
        max_files: int,
        on_rejected: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(server, loop=loop, **options)
        self._event_loop = loop
        self._slow_reader_seconds = slow_reader_seconds
        self._max_files = max_files
        self._on_rejected = on_rejected
        self._refused = False
        # The body of the newest request.
        self._body: StreamReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        # aiohttp forgets its own transport before everything is sent.
        self._wire: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepts a client, or refuses it if there are too many connections."""
        # NOTE: the loop guarantees a Transport; uvloop's class does not inherit from it.
        self._wire = cast(asyncio.Transport, transport)
        # The system assigns the lowest free file number.
        if transport.get_extra_info("socket").fileno() >= self._max_files:
            self._refuse(self._wire)
        else:
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Receives data, unless the connection was refused."""
        if self._refused:
            return
        known = len(self._messages)
        super().data_received(data)
        for message, body in islice(self._messages, known, None):
            if isinstance(message, RawRequestMessage):
                self._body = body
            elif self._body is not None and not self._body.is_eof():
                # NOTE: not at once: a reader that was just woken by data would miss the exception.
                self._event_loop.call_soon(self._fail, self._body)

    def pause_writing(self) -> None:
        """Starts the timer of a client that does not read fast enough."""
        super().pause_writing()
        self._timer = self._event_loop.call_later(self._slow_reader_seconds, self._cut_off)

    def resume_writing(self) -> None:
        """Stops the timer, because the client has caught up."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the connection's running request, if any."""
        self._stop_timer()
        if not self._refused:
            super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Replies to malformed HTTP, and to requests whose handling failed in aiohttp."""
        if request.writer.output_size > 0:
            raise ConnectionError("a reply has begun; no other can be sent")
        match exc:
            case LineTooLong():
                problem = Problem(431, "a line of the request's head is too long")
            case BadHttpMessage() if "Too many headers" in str(exc):
                problem = Problem(431, "the request has too many headers")
            case BadHttpMessage():
                # NOTE: aiohttp's own message quotes the client's data.
                problem = Problem(400, "this is not valid HTTP/1.1", code="malformed")
            case _:
                logger.error("a connection failed: %s", redacted_traceback(exc))
                problem = Problem(500, "internal error", type="server_error", code="internal_error")
        if problem.status < 500:
            self._on_rejected("malformed")
        response = problem.response(problem.reply())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs a traceback without the request's data, which aiohttp's own may quote."""
        error = kw.get("exc_info")
        # The rest of a refused body is discarded, and need not be valid.
        level = logging.DEBUG if isinstance(error, web.RequestPayloadError) else logging.ERROR
        logger.log(level, "a connection failed: %s", redacted_traceback(error))

    def _fail(self, body: StreamReader) -> None:
        """Ends the reading of a body whose chunks are malformed.

        aiohttp reports the error only after the request, which would wait for the rest of its body.
        """
        if body.exception() is None:
            body.set_exception(web.RequestPayloadError("its chunks are malformed"))
            self._on_rejected("malformed")

    def _refuse(self, wire: asyncio.Transport) -> None:
        self._refused = True
        self._on_rejected("connections")
        wire.write(_too_many_connections())
        wire.close()

    def _cut_off(self) -> None:
        self._timer = None
        if self._wire is not None:
            logger.info("cut off a client that did not read for %g s", self._slow_reader_seconds)
            self._wire.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _too_many_connections() -> bytes:
    """A reply as bytes, because there is no request yet that aiohttp could answer."""
    problem = Problem(
        *(503, "the server has as many connections as it may have open files", "server_error"),
        code="too_many_connections",
    )
    body = msgspec.json.encode(problem.reply())
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_SECONDS}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
