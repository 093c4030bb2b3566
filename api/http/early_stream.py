"""Streams that begin before their content is known, so that clients see keep-alives meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from chairlift.api.http.requests import route_of
from chairlift.api.http.sse import EventStream, Framing

FRAMINGS: web.AppKey[Mapping[tuple[str, str], Framing]] = web.AppKey("framings", Mapping)
_EARLY: web.RequestKey[EventStream] = web.RequestKey("early_stream", EventStream)


def event_stream(
    http: web.Request,
    framing: Framing,
    keep_alive_seconds: float,
    is_too_slow: Callable[[], bool] = lambda: False,
) -> EventStream:
    """The request's stream, which may have begun; see ``EventStream``."""
    early: EventStream | None = http.get(_EARLY)
    if early is None:
        return EventStream(http, framing, keep_alive_seconds, is_too_slow)
    early.watch(is_too_slow)
    return early


async def begin_stream(http: web.Request, keep_alive_seconds: float) -> None:
    """Begins the reply as a stream in the framing of its route. Errors become its last event.

    Raises:
        ConnectionResetError: the client has left.
    """
    framing = http.app[FRAMINGS][http.method, route_of(http)]
    stream = http[_EARLY] = EventStream(http, framing, keep_alive_seconds, lambda: False)
    await stream.__aenter__()


async def end_stream(http: web.Request, body: bytes, is_error: bool) -> web.StreamResponse | None:
    """Sends the reply's body as the last event of a stream that has begun; None if none has.

    Raises:
        ConnectionResetError: the client has left.
    """
    stream: EventStream | None = http.get(_EARLY)
    if stream is None:
        return None
    try:
        await stream.send_body(body, is_error)
        await stream.finish()
    finally:
        stream.close()
    return stream.response


def is_early(http: web.Request, response: web.StreamResponse) -> bool:
    """Whether ``response`` is that of the stream that has begun, or there is no such stream."""
    early = http.get(_EARLY)
    return early is None or early.response is response


def close_stream(http: web.Request) -> None:
    """Stops the keep-alives of a stream that has begun."""
    if (early := http.get(_EARLY)) is not None:
        early.close()
