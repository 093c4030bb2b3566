"""Models with scripted loads, for tests of the pool without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.models.entry import ModelEntry, ModelPlan, UnloadReason
from chairlift.api.models.pool import ModelPool
from chairlift.api.models.served_model import ServedModel
from chairlift.engine.errors import ModelError
from chairlift.engine.messages import OnProgress

# Making its limits takes long.
_INFO = model_info()


@dataclass
class SimulatedLoader:
    """Loads in ``seconds``, and fails as often as ``failures`` says.

    Attributes:
        began: the number of loads that began.
        running: whether an engine runs.
    """

    name: str
    seconds: float = 1.0
    failures: int = 0
    unload_seconds: float = 0.1
    began: int = 0
    running: bool = False

    async def load(self, on_progress: OnProgress) -> ServedModel:
        assert not self.running, f"{self.name} has two engines"
        self.began += 1
        self.running = True
        try:
            await asyncio.sleep(self.seconds)
            if self.began <= self.failures:
                raise ModelError(f"{self.name}: damaged")
        except BaseException:
            self.running = False
            raise
        engine = FakeEngine(_INFO, lambda request, index: Scripted([]))
        return ServedModel(self.name, engine, cast(Any, None))

    async def unload(self, model: ServedModel) -> None:
        assert not model.client.unfinished, f"{self.name} was unloaded with work"
        await asyncio.sleep(self.unload_seconds)
        self.running = False


@dataclass
class Log:
    """A ``PoolListener`` that keeps what it is told.

    Attributes:
        pool: checked at each event.
        unloads: name and reason of each unload.
    """

    pool: ModelPool | None = None
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unloads: list[tuple[str, UnloadReason]] = field(default_factory=list)
    most: int = 0

    def model_loaded(self, model: ServedModel, seconds: float) -> None:
        self.loaded.append(model.name)

    def load_failed(self, name: str) -> None:
        self.failed.append(name)

    def model_unloaded(self, name: str, reason: UnloadReason) -> None:
        self.unloads.append((name, reason))

    def memory_changed(self, used: int) -> None:
        self.most = max(self.most, used)
        if self.pool is not None:
            self.pool.check_integrity()


@dataclass
class Simulated:
    """A pool of simulated models."""

    pool: ModelPool
    log: Log
    loaders: dict[str, SimulatedLoader]

    def entry(self, name: str) -> ModelEntry:
        return self.pool.find(name)

    def states(self) -> dict[str, str]:
        return {entry.name: entry.state for entry in self.pool.entries}


def simulated(
    plans: list[ModelPlan],
    budget: int | None,
    loader: Callable[[str], SimulatedLoader] = SimulatedLoader,
) -> Simulated:
    """A pool of models that ``loader`` makes; it has begun."""
    log = Log()
    loaders = {plan.name: loader(plan.name) for plan in plans}
    pool = ModelPool([ModelEntry(plan, loaders[plan.name]) for plan in plans], budget, log)
    log.pool = pool
    pool.begin()
    return Simulated(pool, log, loaders)


def lazy(name: str, memory: int = 1, **fields: Any) -> ModelPlan:
    """A model that is loaded on first use."""
    return ModelPlan(name, is_eager=False, memory=memory, **fields)


async def use(models: Simulated, name: str, seconds: float, limit: float | None = None) -> float:
    """Uses a model for some time; returns how long it waited for it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    lease = await models.pool.acquire(models.entry(name), limit)
    waited = loop.time() - began
    try:
        assert models.entry(name).state == "loaded"
        await asyncio.sleep(seconds)
        assert models.entry(name).state == "loaded", "it was unloaded with work"
    finally:
        lease.release()
    return waited
