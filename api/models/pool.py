"""The models of one server: loads them on use, unloads the least recently used, never a busy one.

Every decision is taken in ``_balance``, which runs after each change and looks at the whole state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from chairlift.api.errors import ModelBusy, NotReady, UnknownModel
from chairlift.api.models.entry import Lease, ModelEntry, UnloadReason, Waiter
from chairlift.api.models.served_model import ServedModel
from chairlift.engine.errors import ModelError, QueueFull

logger = logging.getLogger(__name__)

# While something depends on time, the state is looked at this often, in seconds. Engine clients
# send no event when they become idle.
TICK_SECONDS = 0.25
# Loads at the same time: they share the disk and the CPU, but a small model need not wait for a
# large one.
MAX_LOADS = 2
# A model in constant use gives way to one that has waited this long for its memory: it gets no new
# requests until it was idle once. Otherwise its users could keep all others out for ever.
TURN_SECONDS = 10.0
# After a failed load the next one waits this long, and twice as long after each further failure.
RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 300.0
# Ollama's clients name models with this tag.
LATEST = ":latest"


class PoolListener(Protocol):
    """Learns what happens to the models; the methods must not raise."""

    def model_loaded(self, model: ServedModel, seconds: float) -> None: ...
    def load_failed(self, name: str) -> None: ...
    def model_unloaded(self, name: str, reason: UnloadReason) -> None: ...
    def memory_changed(self, used: int) -> None: ...


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
        self.is_started = False
        self._names = {entry.name: entry for entry in self.entries}
        for entry in self.entries:
            entry.on_release = self._released
            for alias in entry.plan.aliases:
                self._names.setdefault(alias, entry)
        self._listener = listener
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[str] | None = None

    def find(self, name: str | None) -> ModelEntry:
        """The model of that name or alias, with or without Ollama's tag; None: the first model.

        Raises:
            UnknownModel: there is none.
        """
        if name is None:
            return self.entries[0]
        entry = self._names.get(name) or self._names.get(name.removesuffix(LATEST))
        if entry is None:
            known = ", ".join(repr(entry.name) for entry in self.entries)
            raise UnknownModel(
                f"the model {name[:200]!r} does not exist; this server has {known}", "model"
            )
        return entry

    @property
    def names(self) -> Sequence[str]:
        """All names and aliases."""
        return tuple(self._names)

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are loaded now."""
        return [entry.model for entry in self.entries if entry.model is not None]

    @property
    def used(self) -> int:
        """Bytes of the budget that models take now."""
        return sum(entry.memory for entry in self.entries)

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
            raise NotReady(_failed(entry), entry.retry_at - now)
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
        self._changed.set()
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
            self._changed.set()

    async def load(self, entry: ModelEntry, seconds: float | None) -> None:
        """Loads a model, even if its last load failed just now. Raises as ``acquire``."""
        entry.retry_at = 0.0
        (await self.acquire(entry, seconds)).release()

    async def unload(self, entry: ModelEntry) -> None:
        """Unloads a model that has no work; does nothing if it is not loaded.

        Raises:
            ModelBusy: requests use it or wait for it.
        """
        if entry.is_busy or entry.waiters or entry.state == "loading":
            raise ModelBusy(f"requests use the model {entry.name!r} or wait for it")
        if entry.state == "loaded":
            await asyncio.shield(self._begin_unload(entry, "request"))

    def add_loaded(self, entry: ModelEntry, model: ServedModel) -> None:
        """Serves a model that was loaded by other means."""
        self._enter(entry, model, 0.0)
        self.is_started = True

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
        self.is_started = True

    async def ended(self) -> str:
        """Waits until the server's only model, loaded at the start, is lost for good; says why."""
        return await asyncio.shield(self._ending())

    def begin(self) -> None:
        """Begins to load models that requests wait for, and to unload idle ones."""
        self._spawn(self._run())

    async def _run(self) -> None:
        while True:
            self._balance()
            depends_on_time = any(
                entry.waiters or (entry.state == "loaded" and entry.plan.keep_alive is not None)
                for entry in self.entries
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), TICK_SECONDS if depends_on_time else None
                )
            self._changed.clear()

    async def close(self) -> None:
        """Ends all engines and fails the requests that wait."""
        for task in self._tasks - self._unloads:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for entry in self.entries:
            self._fail_waiters(entry, NotReady("the server is stopping"))
        unloads = [
            entry.loader.unload(entry.model) for entry in self.entries if entry.model is not None
        ]
        await asyncio.gather(*unloads)

    def check_integrity(self) -> None:
        """Checks what must hold between any two decisions, for tests."""
        assert self.budget is None or self.used <= self.budget, (self.used, self.budget)
        for entry in self.entries:
            assert entry.leases >= 0
            assert (entry.model is not None) == (entry.state in ("loaded", "unloading"))
            assert not (entry.state == "unloading" and entry.is_busy), entry.name

    def _balance(self) -> None:
        """Unloads idle models, and loads those that requests wait for, the longest wait first."""
        now = asyncio.get_running_loop().time()
        for entry in self.entries:
            entry.is_claimed = False
            if entry.is_busy:
                entry.last_used = now
        wanted = self._wanted(now)
        for entry in wanted:
            if not self._can_begin(entry, now):
                break
            entry.state, entry.load_began = "loading", now
            self._spawn(self._load(entry))
        for entry in self.entries:
            if entry.is_ready:
                self._grant(entry)
            if self._is_over(entry, now):
                self._begin_unload(entry, "idle")
        self._listener.memory_changed(self.used)

    def _wanted(self, now: float) -> list[ModelEntry]:
        """The models to load, the one with the oldest request first."""
        wanted = [
            entry
            for entry in self.entries
            if entry.waiters
            and (entry.state == "unloaded" or (entry.state == "failed" and now >= entry.retry_at))
        ]
        return sorted(wanted, key=lambda entry: entry.waiters[0].arrival)

    def _can_begin(self, entry: ModelEntry, now: float) -> bool:
        """Whether a load may begin now. If it lacks memory, others begin to make room for it."""
        if sum(e.state == "loading" for e in self.entries) >= MAX_LOADS:
            return False
        if self.budget is None:
            return True
        missing = self.used + entry.plan.memory - self.budget
        if missing <= 0:
            return True
        missing -= sum(e.memory for e in self.entries if e.state == "unloading")
        loaded = [e for e in self.entries if e.state == "loaded"]
        by_age = sorted(loaded, key=lambda e: (e.is_busy, e.last_used))
        takes_turn = now - entry.waiters[0].arrival >= TURN_SECONDS
        victims = list(_enough(by_age, missing))
        if any(victim.is_busy for victim in victims) and not takes_turn:
            return False
        for victim in victims:
            if victim.is_busy:
                victim.is_claimed = True
            else:
                self._begin_unload(victim, "memory")
        return False

    def _is_over(self, entry: ModelEntry, now: float) -> bool:
        keep_alive = entry.plan.keep_alive
        if keep_alive is None or entry.state != "loaded" or entry.is_busy or entry.waiters:
            return False
        return now - entry.last_used >= keep_alive

    async def _load(self, entry: ModelEntry) -> None:
        if self.is_started or len(self.entries) > 1:
            logger.info("loading the model %s", entry.name)
        try:
            model = await entry.loader.load(entry.note)
        except Exception as error:  # whatever it is, the waiting requests must end
            self._listener.load_failed(entry.name)
            self._fail(entry, (str(error).strip() or type(error).__name__).splitlines()[0])
            return
        self._enter(entry, model, asyncio.get_running_loop().time() - entry.load_began)
        self._changed.set()

    def _enter(self, entry: ModelEntry, model: ServedModel, seconds: float) -> None:
        entry.model = entry.last = model
        entry.state = "loaded"
        entry.last_used = asyncio.get_running_loop().time()
        entry.load_seconds = seconds or entry.load_seconds
        entry.failure, entry.failures = None, 0
        self._listener.model_loaded(model, seconds)
        self._spawn(self._watch(entry, model))
        # At once: without a lease, the model could make room for another before it was used.
        self._grant(entry)

    async def _watch(self, entry: ModelEntry, model: ServedModel) -> None:
        """Waits until the model's engine is lost for good; its requests have failed by then."""
        why = await model.client.died()
        if entry.model is not model or entry.state != "loaded":
            return
        entry.model = None
        logger.error("the engine of the model %s has ended: %s", entry.name, why)
        self._fail(entry, f"the engine has ended: {why}")
        if len(self.entries) == 1 and entry.plan.is_eager:
            self._end(why)
        await entry.loader.unload(model)

    def _end(self, why: str) -> None:
        if not (ended := self._ending()).done():
            ended.set_result(why)

    def _ending(self) -> asyncio.Future[str]:
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def _fail(self, entry: ModelEntry, why: str) -> None:
        now = asyncio.get_running_loop().time()
        entry.state, entry.failure = "failed", why
        pause = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2**entry.failures)
        entry.failures += 1
        entry.retry_at = now + pause
        if self.is_started:  # else the start fails, with this reason
            logger.error("the model %s cannot be served: %s", entry.name, why)
        self._fail_waiters(entry, NotReady(_failed(entry), pause))
        self._changed.set()

    def _begin_unload(self, entry: ModelEntry, reason: UnloadReason) -> asyncio.Task[None]:
        entry.state = "unloading"
        task = self._spawn(self._unload(entry, reason))
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)
        return task

    async def _unload(self, entry: ModelEntry, reason: UnloadReason) -> None:
        assert entry.model is not None
        logger.info("unloading the model %s (%s)", entry.name, reason)
        await entry.loader.unload(entry.model)
        entry.model, entry.state = None, "unloaded"
        self._listener.model_unloaded(entry.name, reason)
        self._changed.set()

    def _grant(self, entry: ModelEntry) -> None:
        for waiter in entry.waiters:
            if not waiter.lease.done():
                waiter.lease.set_result(Lease(entry))
        entry.waiters.clear()

    def _fail_waiters(self, entry: ModelEntry, error: Exception) -> None:
        for waiter in entry.waiters:
            if not waiter.lease.done():
                waiter.lease.set_exception(error)
        entry.waiters.clear()

    def _released(self, entry: ModelEntry) -> None:
        entry.last_used = asyncio.get_running_loop().time()
        if not entry.leases and any(other.waiters for other in self.entries):
            self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _enough(candidates: Iterable[ModelEntry], missing: int) -> Iterator[ModelEntry]:
    """The first candidates that free ``missing`` bytes together."""
    for entry in candidates:
        if missing <= 0:
            return
        missing -= entry.plan.memory
        yield entry


def _take_back(waiter: Waiter) -> None:
    """Releases a lease that was granted to a request in the moment in which it ended."""
    granted = waiter.lease
    if granted.done() and not granted.cancelled() and granted.exception() is None:
        granted.result().release()


def _loading(entry: ModelEntry) -> str:
    return f"not ready: the model {entry.name!r} is not loaded in time"


def _failed(entry: ModelEntry) -> str:
    return f"not ready: the model {entry.name!r} cannot be served: {entry.failure}"
