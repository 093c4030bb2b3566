"""Loads and unloads the models of a server, as the requests that wait for them need it.

Every decision is taken in ``_balance``, which runs after each change and looks at the whole state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from chairlift.api.errors import NotReady
from chairlift.api.models.entry import Lease, ModelEntry, UnloadReason
from chairlift.api.models.served_model import ServedModel

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


class PoolListener(Protocol):
    """Learns what happens to the models; the methods must not raise."""

    def model_loaded(self, model: ServedModel, seconds: float) -> None: ...
    def load_failed(self, name: str) -> None: ...
    def model_unloaded(self, name: str, reason: UnloadReason) -> None: ...
    def memory_changed(self, used: int) -> None: ...


class Lifecycle:
    """Changes the states of ``entries``, within ``budget`` bytes (None: no limit).

    Attributes:
        changed: set it after a change that may allow or need a load.
        is_started: the models that are loaded at the start are loaded.
    """

    def __init__(
        self, entries: Sequence[ModelEntry], budget: int | None, listener: PoolListener
    ) -> None:
        self.changed = asyncio.Event()
        self.is_started = False
        self._entries = entries
        self._budget = budget
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self._unloads: dict[ModelEntry, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[str] | None = None

    @property
    def used(self) -> int:
        """Bytes of the budget that models take now."""
        return sum(entry.memory for entry in self._entries)

    async def ended(self) -> str:
        """See ``ModelPool.ended``."""
        return await asyncio.shield(self._ending())

    def begin(self) -> None:
        """See ``ModelPool.begin``."""
        self._spawn(self._run())

    async def close(self) -> None:
        """See ``ModelPool.close``."""
        for task in self._tasks - set(self._unloads.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for entry in self._entries:
            self._fail_waiters(entry, NotReady("the server is stopping"))
        unloads = [
            entry.loader.unload(entry.model) for entry in self._entries if entry.model is not None
        ]
        await asyncio.gather(*unloads)

    async def _run(self) -> None:
        while True:
            self._balance()
            depends_on_time = any(
                entry.waiters or (entry.state == "loaded" and entry.plan.keep_alive is not None)
                for entry in self._entries
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self.changed.wait(), TICK_SECONDS if depends_on_time else None
                )
            self.changed.clear()

    def _balance(self) -> None:
        """Unloads idle models, and loads those that requests wait for, the longest wait first."""
        now = asyncio.get_running_loop().time()
        for entry in self._entries:
            entry.is_claimed = False
            if entry.is_busy:
                entry.last_used = now
        wanted = self._wanted(now)
        for entry in wanted:
            if not self._can_begin(entry, now):
                break
            entry.state, entry.load_began = "loading", now
            self._spawn(self._load(entry))
        for entry in self._entries:
            if entry.is_ready:
                self._grant(entry)
            if self._is_over(entry, now):
                self.begin_unload(entry, "idle")
        self._listener.memory_changed(self.used)

    def _wanted(self, now: float) -> list[ModelEntry]:
        """The models to load, the one with the oldest request first."""
        wanted = [
            entry
            for entry in self._entries
            if entry.waiters
            and (entry.state == "unloaded" or (entry.state == "failed" and now >= entry.retry_at))
        ]
        return sorted(wanted, key=lambda entry: entry.waiters[0].arrival)

    def _can_begin(self, entry: ModelEntry, now: float) -> bool:
        """Whether a load may begin now. If it lacks memory, others begin to make room for it."""
        if sum(e.state == "loading" for e in self._entries) >= MAX_LOADS:
            return False
        if self._budget is None:
            return True
        missing = self.used + entry.plan.memory - self._budget
        if missing <= 0:
            return True
        missing -= sum(e.memory for e in self._entries if e.state == "unloading")
        loaded = [e for e in self._entries if e.state == "loaded"]
        by_age = sorted(loaded, key=lambda e: (e.is_busy, e.last_used))
        takes_turn = now - entry.waiters[0].arrival >= TURN_SECONDS
        victims = list(_enough(by_age, missing))
        if any(victim.is_busy for victim in victims) and not takes_turn:
            return False
        for victim in victims:
            if victim.is_busy:
                victim.is_claimed = True
            else:
                self.begin_unload(victim, "memory")
        return False

    def _is_over(self, entry: ModelEntry, now: float) -> bool:
        keep_alive = entry.plan.keep_alive
        if keep_alive is None or entry.state != "loaded" or entry.is_busy or entry.waiters:
            return False
        return now - entry.last_used >= keep_alive

    async def _load(self, entry: ModelEntry) -> None:
        if self.is_started or len(self._entries) > 1:
            logger.info("loading the model %s", entry.name)
        try:
            model = await entry.loader.load(entry.note)
        except Exception as error:  # whatever it is, the waiting requests must end
            self._listener.load_failed(entry.name)
            self._fail(entry, (str(error).strip() or type(error).__name__).splitlines()[0])
            return
        self.enter(entry, model, asyncio.get_running_loop().time() - entry.load_began)
        self.changed.set()

    def enter(self, entry: ModelEntry, model: ServedModel, seconds: float) -> None:
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
        if len(self._entries) == 1 and entry.plan.is_eager:
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
        # Doubled so often, any pause exceeds the maximum; more would overflow a float in the end.
        pause = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** min(entry.failures, 16))
        entry.failures += 1
        entry.retry_at = now + pause
        if self.is_started:  # else the start fails, with this reason
            logger.error("the model %s cannot be served: %s", entry.name, why)
        self._fail_waiters(entry, NotReady(failed(entry), pause))
        self.changed.set()

    def begin_unload(self, entry: ModelEntry, reason: UnloadReason) -> asyncio.Task[None]:
        """Begins to unload a loaded model, if that has not begun; returns the task that does it."""
        if (running := self._unloads.get(entry)) is not None:
            return running
        entry.state = "unloading"
        task = self._unloads[entry] = self._spawn(self._unload(entry, reason))
        task.add_done_callback(lambda task: self._unloads.pop(entry))
        return task

    async def _unload(self, entry: ModelEntry, reason: UnloadReason) -> None:
        assert entry.model is not None
        logger.info("unloading the model %s (%s)", entry.name, reason)
        await entry.loader.unload(entry.model)
        entry.model, entry.state = None, "unloaded"
        self._listener.model_unloaded(entry.name, reason)
        self.changed.set()

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


def failed(entry: ModelEntry) -> str:
    """The message for requests of a model that has failed."""
    return f"not ready: the model {entry.name!r} cannot be served: {entry.failure}"
