"""The middleware at the doors: who comes, whether there is room for them, and what they have used.

Everything needs a key, if there are keys, but what tells nothing of anybody's requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import hdrs, web

from chairlift.api.deadline import DEADLINE
from chairlift.api.errors import Unauthorized
from chairlift.api.exchange import route_of
from chairlift.api.keys import ApiKey, find_key
from chairlift.api.page import PAGE_PATHS
from chairlift.api.ratelimit import ACCOUNT, Account
from chairlift.api.routes import ROUTES, Handler
from chairlift.api.service import SERVICE, Service
from chairlift.api.settings import ServerSettings
from chairlift.engine.workers.pool import CLIENT

FREE = PAGE_PATHS | {"/health", "/ping", "/version", "/openapi.json", "/metrics"}
# What makes work: refused while the server drains, and counted against the key's limits.
WORK = frozenset(route.path for route in ROUTES if route.request is not None)

ANONYMOUS = "anonymous"


class Accounts:
    """The account of each key; without keys, one for everybody."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = settings.keys
        self._accounts = {key.name: Account(key.name, key.limits) for key in settings.keys}
        self._anonymous = Account(ANONYMOUS, settings.anonymous)

    def of(self, headers: Mapping[str, str]) -> Account:
        """The account of who sends these headers.

        Raises:
            Unauthorized: there are keys, and this is none of them.
        """
        if not self._keys:
            return self._anonymous
        return self._accounts[_key_of(headers, self._keys).name]


ACCOUNTS: web.AppKey[Accounts] = web.AppKey("accounts", Accounts)


@web.middleware
async def doors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets a request in, or not."""
    route = route_of(request)
    if route in FREE:
        return await handler(request)
    account = request[ACCOUNT] = request.app[ACCOUNTS].of(request.headers)
    # In the queue for the worker processes clients take turns, by their keys or else addresses.
    CLIENT.set(account.name if account.name != ANONYMOUS else request.remote or "")
    if route not in WORK:
        return await handler(request)
    service: Service = request.app[SERVICE]
    with service.drain.admit(service.settings.request_seconds) as deadline:
        request[DEADLINE] = deadline
        account.take_request()
        return await handler(request)


async def tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Adds OpenAI's headers about the key's limits to a reply."""
    if DEADLINE in request:
        response.headers.update(request[ACCOUNT].headers())


def _key_of(headers: Mapping[str, str], keys: tuple[ApiKey, ...]) -> ApiKey:
    scheme, _, given = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    given = given.strip()
    if not given:
        raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
    key = find_key(keys, given)
    if key is None:
        raise Unauthorized("this API key is not known here")
    return key
