"""Cross-origin requests from web pages: off unless origins are named."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web

from chairlift.api.http.requests import Handler

# What a page may read of a reply's headers, besides those that are always readable.
_EXPOSED = ", ".join(
    (
        "Retry-After",
        "X-Request-Id",
        # Where Anthropic's clients look for it.
        "request-id",
        *(
            f"x-ratelimit-{what}-{unit}"
            for unit in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
    )
)
_PREFLIGHT_SECONDS = 600


def allow_origins(app: web.Application, origins: Sequence[str]) -> None:
    """Lets pages from these origins ("*": from any) call ``app``."""

    def allowed(request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin if origin is not None and ("*" in origins or origin in origins) else None

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or asked is None or allowed(request) is None:
            return await handler(request)
        # Browsers send no key here, and nothing is told but what pages may do.
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
        response.headers[hdrs.VARY] = hdrs.ORIGIN
        if (origin := allowed(request)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    # Before the doors, which would want a key.
    app.middlewares.insert(1, preflight)
    app.on_response_prepare.append(mark)
