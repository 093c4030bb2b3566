"""Reads a request's JSON body into its pydantic model without blocking other requests' streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pydantic
from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.errors import problem_of
from chairlift.api.generate.model_lease import lease_model
from chairlift.api.http.encodings import WRONG_BODY, require_known_encoding
from chairlift.api.http.expectations import invite_body
from chairlift.api.schemas.bounds import weight
from chairlift.api.schemas.schemas import RequestT, parse
from chairlift.api.service import SERVICE
from chairlift.engine.errors import RequestError
from chairlift.engine.workers.job import Job, TooExpensive

# Reading a larger body on the event loop would block all streams.
INLINE_BYTES = 64 << 10
# A body with more values is read in a worker process: validating 16,000 takes 25 ms.
INLINE_VALUES = 16_384

T = TypeVar("T")


async def read(request: web.Request, kind: type[RequestT], *, declared: bool = True) -> RequestT:
    """Reads and validates the request's body as ``kind``, and loads the model that it names.

    Args:
        declared: whether the Content-Type must say that the body is JSON. Without that, only
            ``refuse_other_origins`` keeps web pages elsewhere from a server on localhost.

    Raises:
        NotReady: the model cannot be loaded, or not in time.
        RequestError, pydantic.ValidationError: the body is invalid, too expensive to read, or in an
            unknown encoding.
        QueueFull: too many bodies are waiting for a worker process.
        web.HTTPException: the body is too large, too slow, or not declared to be JSON.
        TimedOut, Draining: the request's time limit has passed, or the server is shutting down.
    """
    settings = request.app[SERVICE].settings
    # Only JSON: a web page elsewhere may post text/plain to a server on localhost unasked.
    if declared and request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    require_known_encoding(request)
    if (size := request.content_length or 0) > settings.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(settings.max_body_bytes, size)
    await invite_body(request)
    try:
        async with request[DEADLINE].limit(), asyncio.timeout(settings.body_seconds):
            body = await request.read()
    except web.RequestPayloadError as error:
        raise RequestError(WRONG_BODY) from error
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    parsed: RequestT = await convert(request, (body,), parse, kind, body)
    await lease_model(request, parsed)
    return parsed


async def convert(
    request: web.Request, bodies: Sequence[bytes], work: Callable[..., T], *args: Any
) -> T:
    """Calls ``work``, a module-level function whose cost grows with the JSON in ``bodies``.

    Small bodies are converted on the event loop, large ones with few values in a thread, and large
    ones with many values in a worker process, which is ended if it takes too long.

    Raises:
        RequestError: the conversion is too expensive; or whatever ``work`` raises.
        QueueFull: too many bodies are waiting for a worker process.
    """
    if sum(map(weight, bodies)) <= INLINE_VALUES:
        if sum(map(len, bodies)) <= INLINE_BYTES:
            return work(*args)
        return await asyncio.to_thread(work, *args)
    try:
        async with request[DEADLINE].limit():
            result: T = await request.app[SERVICE].workers.run(Job(_reported, (work, *args)))
    except TooExpensive as error:
        raise RequestError(f"the body {error} to read") from error
    return result


def _reported(work: Callable[..., T], *args: object) -> T:
    """The result of ``work``; validation errors become RequestErrors, which pickle can write."""
    try:
        return work(*args)
    except pydantic.ValidationError as error:
        problem = problem_of(error)
        raise RequestError(problem.message, problem.param) from None
