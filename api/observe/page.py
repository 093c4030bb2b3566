"""The page at ``/``, its files under ``/ui/``, and the events that it shows."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from aiohttp import hdrs, web

from chairlift.api.http.sse import PLAIN, EventStream
from chairlift.api.observe.live import PERIOD_SECONDS, Live
from chairlift.api.service import SERVICE

_FOLDER = Path(__file__).parent / "ui"
_INDEX = "index.html"
EVENTS = "/ui/events"
# Nothing from elsewhere, nothing inline, and in nobody's frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",
}
# NOTE: not by mimetypes, whose answers depend on the machine.
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Where each file is served.
_PATHS = {
    "/" if path.name == _INDEX else f"/ui/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PAGE_PATHS = frozenset(_PATHS)


def add_page(app: web.Application) -> None:
    """Adds the page to ``app``."""
    for route, path in _PATHS.items():
        app.router.add_get(route, partial(_file, path.read_bytes(), _TYPES[path.suffix]))
    app.router.add_get(EVENTS, _events, allow_head=False)
    app.on_shutdown.append(_close)


async def _file(body: bytes, content_type: str, request: web.Request) -> web.Response:
    response = web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)
    response.enable_compression()
    return response


async def _events(request: web.Request) -> web.StreamResponse:
    """Snapshots, until the watcher leaves or the server ends.

    Raises:
        TooManyWatchers: there is no room for one more.
    """
    service = request.app[SERVICE]
    live = service.live
    with live.watching():
        # One who does not read is waited for, and cut off by the connection.
        stream = EventStream(request, PLAIN, service.settings.keep_alive_seconds, lambda: False)
        async with stream as events:
            while not live.closing.is_set():
                await events.send([live.snapshot(service)])
                await _period(live)
            await events.finish()
    return stream.response


async def _period(live: Live) -> None:
    try:
        async with asyncio.timeout(PERIOD_SECONDS):
            await live.closing.wait()
    except TimeoutError:
        return


async def _close(app: web.Application) -> None:
    app[SERVICE].live.closing.set()
