"""Cross-origin requests from web pages, which are refused unless their origins are allowed."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web

from chairlift.api.errors import NotAllowed
from chairlift.api.http.requests import Handler

# Reply headers that a page may read, besides those that browsers always expose.
_EXPOSED = ", ".join(
    (
        "Retry-After",
        "X-Request-Id",
        # The request id for Anthropic's clients.
        "request-id",
        *(
            f"x-ratelimit-{what}-{unit}"
            for unit in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
    )
)
_PREFLIGHT_SECONDS = 600
# Browsers say by it which page a request comes from, if the connection is trustworthy.
_SITE = "Sec-Fetch-Site"


def refuse_other_origins(app: web.Application, origins: Sequence[str]) -> None:
    """Refuses what pages of other origins can make a browser send without a preflight.

    That is a POST whose body is no JSON: an upload, or one without a body. For all others browsers
    ask first, and without ``allow_origins`` they get no permission.
    """

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (
            request.method == hdrs.METH_POST
            and request.content_type != "application/json"
            and _is_foreign(request)
            and _allowed(request, origins) is None
        ):
            raise NotAllowed("web pages of this origin may not call the server: see --cors-origin")
        return await handler(request)

    app.middlewares.insert(1, refuse)


def _is_foreign(request: web.Request) -> bool:
    """Whether a page of another origin has made a browser send the request."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return False
    if (site := request.headers.get(_SITE)) is not None:
        return site != "same-origin"
    return origin.partition("://")[2] != request.headers.get(hdrs.HOST)


def _allowed(request: web.Request, origins: Sequence[str]) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin if origin is not None and ("*" in origins or origin in origins) else None


def allow_origins(app: web.Application, origins: Sequence[str]) -> None:
    """Allows pages from these origins to call ``app``; "*" stands for any origin."""

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if (
            request.method != hdrs.METH_OPTIONS
            or asked is None
            or _allowed(request, origins) is None
        ):
            return await handler(request)
        # Browsers send no key with a preflight. Its reply reveals only what pages may do.
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(
                    hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ""
                ),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_PREFLIGHT_SECONDS),
            },
        )

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if (origin := _allowed(request, origins)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    # Before admission, which would demand a key.
    app.middlewares.insert(1, preflight)
    app.on_response_prepare.append(mark)
