"""The admission middleware: checks the API key, its limits, and whether the server is draining."""

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

# The access class of a route. "free": no key, because the reply reveals nothing about requests.
# "key": an API key, if the server has keys. "work": a key, too; the request counts against the
# key's limits, gets a deadline, and is refused while the server drains.
Access = Literal["free", "key", "work"]


def admission(
    access: Mapping[tuple[str, str], Access],
    accounts: Accounts,
    drain: Drain,
    request_seconds: float | None,
) -> Middleware:
    """Makes the middleware.

    Args:
        access: the access class of each route, by its method and pattern; other routes have "key".
        accounts: the accounts of the keys.
        drain: the running requests.
        request_seconds: each request's time limit; None means unlimited.
    """

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = access.get((request.method, route_of(request)), "key")
        if needed == "free":
            return await handler(request)
        account = request[ACCOUNT] = accounts.account_for(request.headers)
        # The queue of the worker processes is fair between clients: by key, or else by address.
        CLIENT.set(account.name if account.name != ANONYMOUS else request.remote or "")
        if needed == "key":
            return await handler(request)
        with drain.admit(request_seconds) as deadline:
            request[DEADLINE] = deadline
            account.take_request()
            return await handler(request)

    return admit


async def add_limit_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds OpenAI's headers with the key's limits to the reply of a route that does work."""
    if DEADLINE in request:
        response.headers.update(request[ACCOUNT].headers())
