"""The API process's record of an engine's LoRA adapters, from which another engine loads them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from chairlift.engine.errors import AdapterError, ChairliftError, EngineDead
from chairlift.engine.messages import (
    AdapterFailed,
    AdapterLoaded,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)

log = logging.getLogger(__name__)

MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter.

    Attributes:
        name: by which requests name it.
        key: by which the engine knows it. Each load has another one, so that requests keep their
            adapter when its name is given to another.
        path: the folder of its files.
        digest: SHA-256 of its files.
        rank: the width of its matrices.
        created: the time of loading, in Unix seconds.
    """

    name: str
    key: str
    path: str
    digest: str
    rank: int
    created: int = field(default_factory=lambda: int(time.time()))


class _Loading(NamedTuple):
    name: str
    path: str
    done: asyncio.Future[Adapter]


class AdapterTable:
    """The adapters of one engine. Everything runs in one event loop.

    Args:
        send: sends a message to the engine; one that is not ready yet gets it by ``restore``.
        in_use: the keys of the adapters of all unfinished requests.

    Attributes:
        loaded: the adapters that requests may name.
    """

    def __init__(
        self, send: Callable[[ToEngine], None], in_use: Callable[[], Iterable[str]]
    ) -> None:
        self.loaded: dict[str, Adapter] = {}
        self._send = send
        self._in_use = in_use
        self._loading: dict[str, _Loading] = {}
        # Adapters without a name, by key, which unfinished requests still have.
        self._retired: dict[str, Adapter] = {}
        self._numbers = count(1)
        # The adapters of requests that are being prepared, by key.
        self._held: Counter[str] = Counter()
        self._closed: str | None = None

    async def load(self, name: str, path: str, replace: bool = False) -> Adapter:
        """Loads an adapter, and waits until requests may name it.

        Args:
            replace: if another adapter has the name, new requests get this one once it is loaded.

        Raises:
            AdapterError: the name is taken or invalid, or the adapter cannot be loaded.
            EngineDead: the engine has ended, perhaps by the adapter.
        """
        check_name(name)
        if self._closed is not None:
            raise EngineDead(self._closed)
        if any(loading.name == name for loading in self._loading.values()):
            raise AdapterError(f"the adapter {name!r} is being loaded")
        if name in self.loaded and not replace:
            raise AdapterError(f"the adapter {name!r} is loaded already")
        key = f"{name}#{next(self._numbers)}"
        done: asyncio.Future[Adapter] = asyncio.get_running_loop().create_future()
        self._loading[key] = _Loading(name, path, done)
        self._send(LoadAdapter(key, path))
        return await done

    def unload(self, name: str) -> None:
        """Takes an adapter's name away; the engine keeps it while requests have it.

        Raises:
            KeyError: there is no such adapter.
        """
        adapter = self.loaded.pop(name)
        self._retired[adapter.key] = adapter
        self.release()

    def has(self, key: str) -> bool:
        """Whether the engine has the adapter of this key; "" stands for none."""
        known = (*self.loaded.values(), *self._retired.values())
        return not key or any(adapter.key == key for adapter in known)

    def hold(self, key: str) -> Callable[[], None]:
        """Keeps an adapter in the engine, also without its name, until the result is called."""
        self._held[key] += 1

        def let_go() -> None:
            self._held[key] -= 1
            self.release()

        return let_go

    def release(self) -> None:
        """Unloads the retired adapters that no request has any more."""
        if not self._retired:
            return
        self._held = +self._held
        for key in self._retired.keys() - set(self._in_use()) - self._held.keys():
            del self._retired[key]
            self._send(UnloadAdapter(key))

    def receive(self, message: AdapterLoaded | AdapterFailed) -> None:
        """Handles the engine's answer to a load."""
        loading = self._loading.pop(message.key, None)
        if loading is None:
            if isinstance(message, AdapterFailed):
                self._lost(message)
        elif isinstance(message, AdapterFailed):
            _fail(loading, AdapterError(message.message))
        else:
            adapter = Adapter(loading.name, message.key, loading.path, message.digest, message.rank)
            if (previous := self.loaded.get(loading.name)) is not None:
                self._retired[previous.key] = previous
            self.loaded[loading.name] = adapter
            self.release()
            if not loading.done.done():  # else the caller has left
                loading.done.set_result(adapter)

    def restore(self) -> None:
        """Loads all adapters in a new engine, before it gets the requests that have them."""
        for adapter in (*self.loaded.values(), *self._retired.values()):
            self._send(LoadAdapter(adapter.key, adapter.path, adapter.digest))
        for key, loading in self._loading.items():
            self._send(LoadAdapter(key, loading.path))

    def fail_loading(self, why: str) -> None:
        """Ends the loads that an engine has not finished; they may have ended the engine."""
        for loading in self._loading.values():
            _fail(loading, EngineDead(why))
        self._loading.clear()

    def close(self, why: str) -> None:
        """Ends all loads, also later ones: the engine has ended, and there will be no other."""
        self._closed = why
        self.fail_loading(why)

    def _lost(self, message: AdapterFailed) -> None:
        """Forgets an adapter that a new engine could not load; it fails the requests of it."""
        log.error("an adapter is lost: %s", message.message)
        self._retired.pop(message.key, None)
        self.loaded = {n: one for n, one in self.loaded.items() if one.key != message.key}


def check_name(name: str) -> None:
    """Raises AdapterError if an adapter cannot have this name."""
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and name.strip() == name):
        raise AdapterError(
            f"{name[:MAX_NAME_CHARS]!r} cannot name an adapter: a name has 1 to {MAX_NAME_CHARS} "
            "printable characters"
        )


def _fail(loading: _Loading, error: ChairliftError) -> None:
    if not loading.done.done():
        loading.done.set_exception(error)
        loading.done.exception()  # retrieved: the caller may have left
