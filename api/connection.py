"""One client's connection: what is no HTTP gets a clear error, who does not read is cut off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from chairlift.api.errors import Problem
from chairlift.engine.trace import trace_of

logger = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """aiohttp's, and bounded where that is not.

    What is sent waits in the transport while the client does not read. Once it is more than the
    transport's mark (64 KiB), the client has ``slow_reader_seconds`` to read most of it.
    ``on_malformed`` is called for what is no HTTP.
    """

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        slow_reader_seconds: float,
        on_malformed: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(server, loop=loop, **options)
        self._event_loop = loop
        self._slow_reader_seconds = slow_reader_seconds
        self._on_malformed = on_malformed
        self._cut: asyncio.TimerHandle | None = None
        # aiohttp forgets its own before all is sent.
        self._wire: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        # NOTE: by the loop's contract; uvloop's are no subclass of it.
        self._wire = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """The client does not read fast enough."""
        super().pause_writing()
        self._cut = self._event_loop.call_later(self._slow_reader_seconds, self._cut_off)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the request, if there is one."""
        self._keep()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply to what never came to the application, or broke it."""
        if request.writer.output_size > 0:
            raise ConnectionError("a reply has begun; no other can be sent")
        match exc:
            case LineTooLong():
                problem = Problem(431, "a line of the request's head is too long")
            case BadHttpMessage() if "Too many headers" in str(exc):
                problem = Problem(431, "the request has too many headers")
            case BadHttpMessage():
                # NOTE: aiohttp's own text quotes what was sent.
                problem = Problem(400, "this is not valid HTTP/1.1", code="malformed")
            case _:
                logger.error("a connection failed: %s", trace_of(exc))
                problem = Problem(500, "internal error", type="server_error", code="internal_error")
        if problem.status < 500:
            self._on_malformed()
        response = problem.response(problem.reply())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """aiohttp's traces may quote a request; ours do not."""
        error = kw.get("exc_info")
        # The rest of a body that was refused is thrown away, and need not be valid.
        level = logging.DEBUG if isinstance(error, web.RequestPayloadError) else logging.ERROR
        logger.log(level, "a connection failed: %s", trace_of(error))

    def _cut_off(self) -> None:
        self._cut = None
        if self._wire is not None:
            logger.info("cut off a client that did not read for %g s", self._slow_reader_seconds)
            self._wire.abort()

    def _keep(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None
