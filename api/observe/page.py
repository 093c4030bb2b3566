"""Serves the page at ``/``, its files under ``/ui/``, and its event stream."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from aiohttp import ETag, hdrs, web

from chairlift.api.http.sse import PLAIN, EventStream
from chairlift.api.observe.live import PERIOD_SECONDS, Live, ServerStatus

_FOLDER = Path(__file__).parent / "ui"
_INDEX = "index.html"
EVENTS = "/ui/events"
# They forbid foreign content, inline scripts and styles, and framing by other sites. Data URLs are
# the images that the user shows the model.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
}
# NOTE: do not use mimetypes, whose results depend on the machine.
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
# Files by the path that serves them. Licences and notes next to them are not served.
_PATHS = {
    "/" if path.name == _INDEX else f"/ui/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _TYPES
}
PAGE_PATHS = frozenset(_PATHS)


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is sent."""

    content_type: str
    body: bytes
    compressed: bytes
    etag: str


@cache
def _read(path: Path) -> _File:
    """Reads and compresses a file when it is first asked for: the largest takes some 20 ms."""
    body = path.read_bytes()
    etag = hashlib.sha256(body).hexdigest()[:32]
    return _File(_TYPES[path.suffix], body, gzip.compress(body, 6, mtime=0), etag)


def add_page(
    app: web.Application, live: Live, server: ServerStatus, keep_alive_seconds: float
) -> None:
    """Adds the page to ``app``. Its event streams get a keep-alive every ``keep_alive_seconds``."""
    for route, path in _PATHS.items():
        app.router.add_get(route, partial(_send, path))
    events = partial(_events, live, server, keep_alive_seconds)
    app.router.add_get(EVENTS, events, allow_head=False)

    async def close(app: web.Application) -> None:
        live.closing.set()

    app.on_shutdown.append(close)


async def _send(path: Path, request: web.Request) -> web.Response:
    file = _read(path)
    known = request.if_none_match or ()
    if any(tag.value == file.etag for tag in known):
        response = web.Response(status=304, headers=_HEADERS)
    elif "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
        response = web.Response(body=file.compressed, headers=_HEADERS)
        response.headers[hdrs.CONTENT_ENCODING] = "gzip"
    else:
        response = web.Response(body=file.body, headers=_HEADERS)
    response.etag = ETag(file.etag)
    response.content_type = file.content_type
    response.charset = "utf-8"
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
