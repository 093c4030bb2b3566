"""Streams the events of a background response, from any number on."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence

from aiohttp import hdrs, web

from chairlift.api.http.early_stream import event_stream
from chairlift.api.http.sse import RESPONSES
from chairlift.api.service import SERVICE
from chairlift.engine.errors import RequestError

QUERY: Mapping[str, Mapping[str, object]] = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": 0},
}
_NUMBER = re.compile(r"[0-9]{1,9}")


def first_event(query: Mapping[str, str]) -> int | None:
    """The number of the first event that a request's query asks for; None if for no stream.

    Raises:
        RequestError: a value is invalid.
    """
    stream = query.get("stream", "false")
    if stream not in ("true", "false"):
        raise RequestError("stream: must be true or false", "stream")
    after = query.get("starting_after")
    if stream == "false":
        if after is not None:
            raise RequestError("starting_after needs stream to be true", "starting_after")
        return None
    if after is None:
        return 0
    if not _NUMBER.fullmatch(after):
        raise RequestError("starting_after: must be the number of an event", "starting_after")
    return int(after) + 1


async def stored_events(events: Sequence[bytes]) -> AsyncIterator[list[bytes]]:
    """The events of a response that has ended."""
    yield list(events)


async def stream_events(
    http: web.Request, events: AsyncIterator[list[bytes]]
) -> web.StreamResponse:
    """Sends framed events until there are no more. A client that leaves ends nothing else."""
    settings = http.app[SERVICE].settings
    # The response keeps its events anyway, so a slow client costs no memory here.
    async with event_stream(http, RESPONSES, settings.keep_alive_seconds) as stream:
        # NOTE: aiohttp would send what is written in reply to HEAD, too; for the client it would be
        # the beginning of the next reply.
        if http.method != hdrs.METH_HEAD:
            async for framed in events:
                await stream.send_framed(framed)
            await stream.finish()
    return stream.response
