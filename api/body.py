"""Reads a request's JSON body into its pydantic model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from aiohttp import web

from chairlift.api.deadline import DEADLINE
from chairlift.api.schemas import RequestT, parse
from chairlift.api.service import SERVICE
from chairlift.engine.errors import RequestError

# Validating more than this would hold up everyone's streams.
INLINE_BYTES = 64 << 10

T = TypeVar("T")


async def read(request: web.Request, kind: type[RequestT]) -> RequestT:
    """The body as ``kind``.

    Raises:
        RequestError, pydantic.ValidationError: it is not a valid one.
        web.HTTPException: it is too large, too slow, or not declared to be JSON.
        TimedOut, Draining: the request's time is up.
    """
    settings = request.app[SERVICE].settings
    # Only JSON: a web page elsewhere may post text/plain to a server on localhost unasked.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        async with request[DEADLINE].limit(), asyncio.timeout(settings.body_seconds):
            body = await request.read()
    except web.RequestPayloadError as error:
        raise RequestError("the body is cut short or wrongly encoded") from error
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    return await convert(len(body), partial(parse, kind, body))


async def convert(size: int, work: Callable[[], T]) -> T:
    """Does ``work`` on a body of ``size`` bytes, in a thread if it is a large one."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)
