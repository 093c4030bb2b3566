"""The middleware at the doors: who comes, whether there is room for them, and what they have used.

Everything needs a key, if there are keys, but what tells nothing of anybody's requests.
"""

from __future__ import annotations

from aiohttp import web

from chairlift.api.admission.accounts import ANONYMOUS
from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.observe.page import PAGE_PATHS
from chairlift.api.observe.request_record import route_of
from chairlift.api.server.routes import ROUTES, Handler
from chairlift.api.service import SERVICE, Service
from chairlift.engine.workers.pool import CLIENT

FREE = PAGE_PATHS | {"/health", "/ping", "/version", "/openapi.json", "/metrics"}
# What makes work: refused while the server drains, and counted against the key's limits.
WORK = frozenset(route.path for route in ROUTES if route.request is not None)


@web.middleware
async def doors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets a request in, or not."""
    route = route_of(request)
    if route in FREE:
        return await handler(request)
    service: Service = request.app[SERVICE]
    account = request[ACCOUNT] = service.accounts.of(request.headers)
    # In the queue for the worker processes clients take turns, by their keys or else addresses.
    CLIENT.set(account.name if account.name != ANONYMOUS else request.remote or "")
    if route not in WORK:
        return await handler(request)
    with service.drain.admit(service.settings.request_seconds) as deadline:
        request[DEADLINE] = deadline
        account.take_request()
        return await handler(request)


async def tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Adds OpenAI's headers about the key's limits to a reply."""
    if DEADLINE in request:
        response.headers.update(request[ACCOUNT].headers())
