"""The accounts of API keys, which authorize requests and count usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import hdrs

from chairlift.api.admission.keys import ApiKey, KeyLimits, find_key
from chairlift.api.admission.ratelimit import Account
from chairlift.api.errors import Unauthorized

ANONYMOUS = "anonymous"


class Accounts:
    """One account per key. Without keys, all clients share the account ``anonymous``."""

    def __init__(self, keys: Sequence[ApiKey], anonymous: KeyLimits) -> None:
        self._keys = tuple(keys)
        self._anonymous_limits = anonymous
        self._batch_accounts: dict[str, Account] = {}
        self._accounts = {key.name: Account(key.name, key.limits) for key in keys}
        self._anonymous = Account(ANONYMOUS, anonymous)

    def account_for(self, headers: Mapping[str, str]) -> Account:
        """The account of the client that sent these headers.

        Raises:
            Unauthorized: the server has keys, and the headers contain none of them.
        """
        if not self._keys:
            return self._anonymous
        return self._accounts[_key_of(headers, self._keys).name]

    def batch_account(self, name: str) -> Account | None:
        """The account that a client's batches count against; None if it has no key any more.

        It has the limits of the client's own account, but its own usage: a batch takes nothing away
        from the client's other requests.
        """
        if self._keys:
            limits = next((key.limits for key in self._keys if key.name == name), None)
        else:
            limits = self._anonymous_limits if name == ANONYMOUS else None
        if limits is None:
            return None
        account = self._batch_accounts.setdefault(name, Account(name, limits))
        account.limit(limits)
        return account

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Replaces all keys.

        An account is identified by its key's name, and its usage so far counts against the new
        limits. Running requests keep their account.
        """
        before = self._accounts
        self._accounts = {
            key.name: before.get(key.name) or Account(key.name, key.limits) for key in keys
        }
        for key in keys:
            self._accounts[key.name].limit(key.limits)
        self._keys = tuple(keys)


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
