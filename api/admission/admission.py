"""The admission middleware: who may send a request, and whether the server takes it now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from aiohttp import web
from aiohttp.typedefs import Middleware

from chairlift.api.admission.accounts import ANONYMOUS, Accounts
from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.drain import Drain
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.http.requests import Handler, route_of
from chairlift.engine.workers.pool import CLIENT

# What a route asks of its client. "free": nothing, as it tells nothing of anybody's requests.
# "key": an API key, if the server has keys. "work": a key, too; the request is counted against the
# key's limits, gets a deadline, and is refused while the server drains.
Access = Literal["free", "key", "work"]


def admission(
    access: Mapping[str, Access], accounts: Accounts, drain: Drain, request_seconds: float | None
) -> Middleware:
    """The middleware. ``access`` is by the routes' patterns; a route that is not in it needs a key.

    ``request_seconds`` is a request's time limit; None means unlimited.
    """

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = access.get(route_of(request), "key")
        if needed == "free":
            return await handler(request)
        account = request[ACCOUNT] = accounts.account_for(request.headers)
        # Clients take turns in the worker processes' queue: by key, or else by address.
        CLIENT.set(account.name if account.name != ANONYMOUS else request.remote or "")
        if needed == "key":
            return await handler(request)
        with drain.admit(request_seconds) as deadline:
            request[DEADLINE] = deadline
            account.take_request()
            return await handler(request)

    return admit


async def add_limit_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds OpenAI's headers about the key's limits to a reply."""
    if DEADLINE in request:
        response.headers.update(request[ACCOUNT].headers())
