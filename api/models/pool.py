"""The models of one server: found by their names, loaded on use, unloaded on request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence

from chairlift.api.errors import ModelBusy, NotReady, UnknownModel
from chairlift.api.models.entry import Lease, ModelEntry, Waiter
from chairlift.api.models.lifecycle import Lifecycle, PoolListener, failed
from chairlift.api.models.served_model import ServedModel
from chairlift.engine.errors import ModelError, QueueFull

# Ollama's clients name models with this tag.
LATEST = ":latest"


class ModelPool:
    """All models of one server.

    ``begin`` must be called before ``acquire`` may have to wait, and ``close`` at the end.

    Args:
        entries: the models; the first is that of requests that name none.
        budget: bytes for all loaded models together; None means unlimited.
        listener: learns about loads and unloads.
    """

    def __init__(
        self, entries: Iterable[ModelEntry], budget: int | None, listener: PoolListener
    ) -> None:
        self.entries = list(entries)
        self.budget = budget
        self._names = {entry.name: entry for entry in self.entries}
        for entry in self.entries:
            entry.on_release = self._released
            for alias in entry.plan.aliases:
                self._names.setdefault(alias, entry)
        self._lifecycle = Lifecycle(self.entries, budget, listener)

    def find(self, name: str | None) -> ModelEntry:
        """The model of that name or alias, with or without Ollama's tag; None: the first model.

        The name may also be that of one of its LoRA adapters, as "adapter" or "model:adapter".

        Raises:
            UnknownModel: there is none.
        """
        if name is None:
            return self.entries[0]
        entry = self._named(name)
        if entry is None:
            adapted = (entry for entry in self.entries if entry.has_adapter(name))
            entry = next(adapted, None)
        if entry is None:
            adapters = (adapter for entry in self.entries for adapter in entry.adapters)
            own = (entry.name for entry in self.entries)
            known = ", ".join(repr(each) for each in dict.fromkeys((*own, *adapters)))
            raise UnknownModel(
                f"the model {name[:200]!r} does not exist; this server has {known}", "model"
            )
        return entry

    def has_model(self, name: str) -> bool:
        """Whether a model has this name or alias, with or without Ollama's tag."""
        return self._named(name) is not None

    def _named(self, name: str) -> ModelEntry | None:
        return self._names.get(name) or self._names.get(name.removesuffix(LATEST))

    @property
    def is_started(self) -> bool:
        """Whether the models that are loaded at the start are loaded."""
        return self._lifecycle.is_started

    @property
    def names(self) -> Sequence[str]:
        """All names and aliases."""
        return tuple(self._names)

    @property
    def request_names(self) -> Sequence[str]:
        """All names that a request may give for a model, without Ollama's tag."""
        adapters: list[str] = []
        for entry in self.entries:
            for adapter in entry.adapters:
                own = (entry.name, *entry.plan.aliases)
                adapters += (adapter, *(f"{name}:{adapter}" for name in own))
        return (*self._names, *adapters)

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are loaded now."""
        return [entry.model for entry in self.entries if entry.model is not None]

    @property
    def used(self) -> int:
        """Bytes of the budget that models take now."""
        return self._lifecycle.used

    @property
    def unhealthy(self) -> str | None:
        """Why no model can serve a request, once the eager ones were loaded; None if one can."""
        reasons = [entry.unhealthy for entry in self.entries]
        if None in reasons:
            return None
        if len(reasons) == 1:
            return reasons[0]
        return "; ".join(
            f"{entry.name}: {reason}" for entry, reason in zip(self.entries, reasons, strict=True)
        )

    def predicted_seconds(self, entry: ModelEntry) -> float | None:
        """Seconds until a load of this model would be done, without waiting for memory.

        It is what its last load took, or else what its size would take at the pace of the others'
        last loads; None if nothing was loaded yet.
        """
        seconds = entry.load_seconds
        if seconds is None:
            known = [e for e in self.entries if e.load_seconds is not None and e.plan.memory]
            if not known:
                return None
            paces = [(e.load_seconds or 0.0) / e.plan.memory for e in known]
            seconds = entry.plan.memory * max(paces)
        if entry.state == "loading":
            seconds -= asyncio.get_running_loop().time() - entry.load_began
        return max(0.0, seconds)

    async def acquire(self, entry: ModelEntry, seconds: float | None) -> Lease:
        """Waits until the model can be used, and loads it if needed.

        Args:
            entry: the model.
            seconds: how long the request may take at most; None means unlimited.

        Raises:
            NotReady: the load has failed, or it would take or has taken longer than ``seconds``.
            QueueFull: too many requests wait for this model.
        """
        if entry.is_ready:
            return Lease(entry)
        now = asyncio.get_running_loop().time()
        if entry.state == "failed" and now < entry.retry_at:
            raise NotReady(failed(entry), entry.retry_at - now)
        predicted = self.predicted_seconds(entry)
        if len(entry.waiters) >= entry.plan.max_waiting:
            raise QueueFull(
                f"{len(entry.waiters)} requests wait for the model {entry.name!r} to be loaded",
                math.ceil(max(1.0, predicted or 0.0)),
            )
        if seconds is not None and predicted is not None and predicted > seconds:
            raise NotReady(_loading(entry), predicted)
        waiter = Waiter(now, asyncio.get_running_loop().create_future())
        entry.waiters.append(waiter)
        self._lifecycle.changed.set()
        try:
            async with asyncio.timeout(seconds):
                return await waiter.lease
        except TimeoutError:
            _take_back(waiter)
            raise NotReady(_loading(entry), self.predicted_seconds(entry) or 1.0) from None
        except asyncio.CancelledError:
            _take_back(waiter)
            raise
        finally:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            self._lifecycle.changed.set()

    async def load(self, entry: ModelEntry, seconds: float | None) -> None:
        """Loads a model, even if its last load failed just now. Raises as ``acquire``."""
        entry.retry_at = 0.0
        (await self.acquire(entry, seconds)).release()

    async def unload(self, entry: ModelEntry) -> None:
        """Unloads a model that has no work, and waits until its memory is free.

        Raises:
            ModelBusy: requests use it or wait for it.
        """
        if entry.is_busy or entry.waiters or entry.state == "loading":
            raise ModelBusy(f"requests use the model {entry.name!r} or wait for it")
        if entry.state in ("loaded", "unloading"):
            await asyncio.shield(self._lifecycle.begin_unload(entry, "request"))

    def add_loaded(self, entry: ModelEntry, model: ServedModel) -> None:
        """Serves a model that was loaded by other means."""
        self._lifecycle.enter(entry, model, 0.0)
        self._lifecycle.is_started = True

    async def start(self) -> None:
        """Loads the eager models.

        Raises:
            ModelError: one of them cannot be loaded.
        """
        eager = [entry for entry in self.entries if entry.plan.is_eager]
        loads = [asyncio.create_task(self.load(entry, None)) for entry in eager]
        try:
            await asyncio.gather(*loads)
        except NotReady as error:
            failures = (entry.failure for entry in eager if entry.state == "failed")
            raise ModelError(next(failures, None) or str(error)) from None
        finally:
            for load in loads:
                load.cancel()
        self._lifecycle.is_started = True

    async def ended(self) -> str:
        """Waits until the server's only model, loaded at the start, is lost for good; says why."""
        return await self._lifecycle.ended()

    def begin(self) -> None:
        """Begins to load models that requests wait for, and to unload idle ones."""
        self._lifecycle.begin()

    async def close(self) -> None:
        """Ends all engines and fails the requests that wait."""
        await self._lifecycle.close()

    def check_integrity(self) -> None:
        """Checks what must hold between any two decisions, for tests."""
        assert self.budget is None or self.used <= self.budget, (self.used, self.budget)
        for entry in self.entries:
            assert entry.leases >= 0
            assert (entry.model is not None) == (entry.state in ("loaded", "unloading"))
            assert not (entry.state == "unloading" and entry.is_busy), entry.name

    def _released(self, entry: ModelEntry) -> None:
        entry.last_used = asyncio.get_running_loop().time()
        if not entry.leases and any(other.waiters for other in self.entries):
            self._lifecycle.changed.set()


def _take_back(waiter: Waiter) -> None:
    """Releases a lease that was granted to a request in the moment in which it ended."""
    granted = waiter.lease
    if granted.done() and not granted.cancelled() and granted.exception() is None:
        granted.result().release()


def _loading(entry: ModelEntry) -> str:
    return f"not ready: the model {entry.name!r} is not loaded in time"
