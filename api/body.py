"""Reads a request's JSON body into its pydantic model."""

from __future__ import annotations

from aiohttp import web

from chairlift.api.schemas import RequestT, parse
from chairlift.engine.errors import RequestError


async def read(request: web.Request, kind: type[RequestT]) -> RequestT:
    """The body as ``kind``.

    Raises:
        RequestError, pydantic.ValidationError: it is not a valid one.
        web.HTTPException: it is too large, or not declared to be JSON.
    """
    # Only JSON: a web page elsewhere may post text/plain to a server on localhost unasked.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        body = await request.read()
    except web.RequestPayloadError as error:
        raise RequestError("the body is cut short or wrongly encoded") from error
    return parse(kind, body)
