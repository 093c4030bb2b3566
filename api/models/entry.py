"""One of the server's models, loaded or not, and the requests that use it or wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from chairlift.api.models.served_model import ServedModel
from chairlift.engine.messages import Loading, OnProgress, silent

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
UnloadReason = Literal["idle", "memory", "request"]


class Loader(Protocol):
    """Starts and ends the engine of one model."""

    async def load(self, on_progress: OnProgress) -> ServedModel:
        """Loads the model; ends whatever it has started if it fails or is cancelled.

        Raises:
            ModelError, EngineDead: the model cannot be served. The message is one line.
        """
        ...

    async def unload(self, model: ServedModel) -> None:
        """Ends the model's engine."""
        ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How one model is served.

    Attributes:
        name: its id in the API.
        aliases: further names of it.
        is_eager: it is loaded at the start; otherwise on first use.
        keep_alive: seconds without a request after which it is unloaded; None: it stays.
        max_waiting: the maximum number of requests that wait for its load.
        memory: bytes that its engine takes of the budget.
        adapters: the names of the LoRA adapters that each load of it loads, too.
    """

    name: str
    aliases: tuple[str, ...] = ()
    is_eager: bool = True
    keep_alive: float | None = None
    max_waiting: int = 256
    memory: int = 0
    adapters: tuple[str, ...] = ()


class Lease:
    """Keeps a model loaded for one request, until ``release``."""

    def __init__(self, entry: ModelEntry) -> None:
        self._entry: ModelEntry | None = entry
        self._adapters: list[Callable[[], None]] = []
        entry.leases += 1

    def keep_adapter(self, model: ServedModel) -> None:
        """Keeps the LoRA adapter of a model, if it has one, in the engine."""
        if model.adapters is not None and model.adapter is not None:
            self._adapters.append(model.adapters.hold(model.adapter.key))

    def release(self) -> None:
        """Gives the model back. Further calls do nothing."""
        if self._entry is not None:
            for let_go in self._adapters:
                let_go()
            self._entry.leases -= 1
            self._entry.on_release(self._entry)
            self._entry = None


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for a model. ``arrival`` is a time of the event loop."""

    arrival: float
    lease: asyncio.Future[Lease]


class ModelEntry:
    """The state of one model. ``ModelPool`` changes it.

    Attributes:
        plan: how it is served.
        loader: starts and ends its engine.
        state: "failed" means that the last load failed or that its engine ended for good.
        model: the model, if it is loaded.
        last: the model of the last load, loaded or not; None if there was none.
        created: when the server began to serve it, loaded or not, in Unix seconds.
        leases: the requests that use it.
        waiters: the requests that wait for it, in the order of their arrival.
        last_used: when it last had work, as a time of the event loop.
        progress: what its load does now.
        failure: why it is "failed", in one line.
        failures: loads in a row that failed.
        retry_at: before this time of the event loop, a failed model is not loaded again.
        load_began: when the running load began.
        load_seconds: how long its last load took; None if there was none.
        on_release: called after a lease has ended. Settable.
        on_progress: called with each report of a load. Settable.
        is_claimed: it gets no further requests, because another model has waited long enough for
            its memory.
    """

    def __init__(self, plan: ModelPlan, loader: Loader) -> None:
        self.plan = plan
        self.loader = loader
        self.state: State = "unloaded"
        self.model: ServedModel | None = None
        self.last: ServedModel | None = None
        self.created = int(time.time())
        self.leases = 0
        self.waiters: list[Waiter] = []
        self.last_used = 0.0
        self.progress = "loading the model"
        self.failure: str | None = None
        self.failures = 0
        self.retry_at = 0.0
        self.load_began = 0.0
        self.load_seconds: float | None = None
        self.is_claimed = False
        self.on_release: Callable[[ModelEntry], None] = lambda entry: None
        self.on_progress: OnProgress = silent

    @property
    def name(self) -> str:
        """The model's id in the API."""
        return self.plan.name

    def has_adapter(self, name: str) -> bool:
        """Whether ``name`` is that of one of its LoRA adapters, as "adapter" or "model:adapter".

        While it is not loaded, it has those that its load will load.
        """
        return not self._adapter_names(name).isdisjoint(self.adapters)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its LoRA adapters; while it is not loaded, of those that it will load."""
        if self.model is None:
            return self.plan.adapters
        return tuple(adapted.name for adapted in self.model.adapted)

    def adapted(self, name: str) -> ServedModel | None:
        """The loaded model with the LoRA adapter of this name; None if there is none."""
        return None if self.model is None else self.model.with_adapter(self._adapter_names(name))

    def _adapter_names(self, name: str) -> frozenset[str]:
        """The names of an adapter for a request's ``name``: with and without the model's name."""
        own = (self.name, *self.plan.aliases)
        return frozenset((name, *(name.removeprefix(f"{each}:") for each in own)))

    @property
    def is_ready(self) -> bool:
        """Whether a request may use the model at once. Its engine may be down for a moment."""
        return self.state == "loaded" and not self.is_claimed

    @property
    def is_busy(self) -> bool:
        """Whether a request uses the model."""
        return self.leases > 0 or (self.model is not None and self.model.client.unfinished > 0)

    @property
    def memory(self) -> int:
        """Bytes of the budget that it takes now."""
        return self.plan.memory if self.state in ("loading", "loaded", "unloading") else 0

    @property
    def unhealthy(self) -> str | None:
        """Why it cannot serve a request, not even after a load; None if it can."""
        if self.state == "failed":
            return self.failure
        if self.state == "loaded" and self.model is not None:
            return self.model.client.unhealthy
        return None

    def note(self, loading: Loading) -> None:
        """Notes the progress of the load."""
        self.progress = str(loading)
        self.on_progress(loading)
