"""The route, the id and the handler type of an HTTP request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The request's id in logs and reply headers: the client's, or a generated one.
REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
# nginx's status for a client that left before the reply; it is only recorded, never sent.
CLIENT_LEFT = 499


def route_of(request: web.Request) -> str:
    """The pattern of the request's route, or "unmatched"."""
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical
