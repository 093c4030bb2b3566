"""Serves the page at ``/``, its files under ``/ui/``, and its event stream."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from aiohttp import hdrs, web

from chairlift.api.http.sse import PLAIN, EventStream
from chairlift.api.observe.live import PERIOD_SECONDS, Live, ServerStatus

_FOLDER = Path(__file__).parent / "ui"
_INDEX = "index.html"
EVENTS = "/ui/events"
# They forbid foreign content, inline scripts and framing by other sites.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",
}
# NOTE: do not use mimetypes, whose results depend on the machine.
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Files by the path that serves them.
_PATHS = {
    "/" if path.name == _INDEX else f"/ui/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PAGE_PATHS = frozenset(_PATHS)


def add_page(
    app: web.Application, live: Live, server: ServerStatus, keep_alive_seconds: float
) -> None:
    """Adds the page to ``app``. Its event streams get a keep-alive every ``keep_alive_seconds``."""
    for route, path in _PATHS.items():
        app.router.add_get(route, partial(_file, path.read_bytes(), _TYPES[path.suffix]))
    events = partial(_events, live, server, keep_alive_seconds)
    app.router.add_get(EVENTS, events, allow_head=False)

    async def close(app: web.Application) -> None:
        live.closing.set()

    app.on_shutdown.append(close)


async def _file(body: bytes, content_type: str, request: web.Request) -> web.Response:
    response = web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)
    response.enable_compression()
    return response


async def _events(
    live: Live, server: ServerStatus, keep_alive_seconds: float, request: web.Request
) -> web.StreamResponse:
    """Streams snapshots until the page is closed or the server stops.

    Raises:
        TooManyWatchers: too many pages are open already.
    """
    with live.watching() as watcher:
        # The connection itself disconnects a page that does not read; see ``server.connection``.
        stream = EventStream(request, PLAIN, keep_alive_seconds, lambda: False)
        async with stream as events:
            while not live.closing.is_set():
                await events.send([watcher.snapshot(server)])
                await _period(live)
            await events.finish()
    return stream.response


async def _period(live: Live) -> None:
    try:
        async with asyncio.timeout(PERIOD_SECONDS):
            await live.closing.wait()
    except TimeoutError:
        return
