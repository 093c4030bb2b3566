"""Cross-origin requests from web pages, which are refused unless their origins are allowed."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web

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


def allow_origins(app: web.Application, origins: Sequence[str]) -> None:
    """Allows pages from these origins to call ``app``; "*" stands for any origin."""

    def allowed(request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin if origin is not None and ("*" in origins or origin in origins) else None

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or asked is None or allowed(request) is None:
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
        response.headers[hdrs.VARY] = hdrs.ORIGIN
        if (origin := allowed(request)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    # Before admission, which would demand a key.
    app.middlewares.insert(1, preflight)
    app.on_response_prepare.append(mark)
