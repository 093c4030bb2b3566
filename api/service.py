"""The state that all handlers share: settings, metrics, and the served model once it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.drain import Drain
from chairlift.api.errors import NotReady
from chairlift.api.http.version import VERSION
from chairlift.api.models.entry import Lease, ModelEntry, ModelPlan, UnloadReason
from chairlift.api.models.given import GivenModel
from chairlift.api.models.pool import ModelPool
from chairlift.api.models.served_model import ServedModel
from chairlift.api.observe.live import Live
from chairlift.api.settings import ServerSettings
from chairlift.engine.messages import StepStats
from chairlift.engine.workers.pool import Workers
from chairlift.metrics.recorder import Recorder

if TYPE_CHECKING:
    # It needs the extra "otel".
    from chairlift.api.observe.tracing import Tracing

__all__ = ["SERVICE", "ServedModel", "Service"]

# Modules that worker processes import before their first body or grammar.
MODULES = (
    "chairlift.api.anthropic.dialogue",
    "chairlift.api.ollama.dialogue",
    "chairlift.api.responses.dialogue",
    "chairlift.engine.grammar.trial",
)
# The module that a worker process for images imports. It imports MLX, so this process must not.
IMAGE_MODULE = "chairlift.engine.model.vision.processors.loading"


class Service:
    """The state of one server. Handlers get it from ``request.app[SERVICE]``.

    Handlers use ``settings``, ``entry``, ``model``, ``recorder``, ``live`` and ``workers``. The
    other attributes are for the middlewares and for the server's start and stop.

    Attributes:
        settings: the API process's settings.
        engines: how many engines may run at the same time.
        recorder: records metrics.
        live: records what the page at / shows.
        accounts: the API keys and the usage of each.
        workers: processes for slow work, like reading large bodies.
        image_workers: processes that decode images.
        tracing: records OpenTelemetry traces, or None.
        drain: the running requests, and whether new ones are refused.
        progress: describes the start, until the models that are loaded at it are.
        models: the models, loaded or not; empty until their files were found.
    """

    def __init__(self, settings: ServerSettings, engines: int = 1) -> None:
        self.settings = settings
        self.engines = engines
        self.recorder = Recorder(VERSION)
        self.live = Live()
        self.accounts = Accounts(settings.keys, settings.anonymous)
        self.workers = Workers(MODULES, record=self.recorder.record_job)
        self.image_workers = Workers((IMAGE_MODULE,), record=self.recorder.record_job)
        self.tracing: Tracing | None = None
        self.drain = Drain()
        self.progress = "loading the model"
        self.models = ModelPool((), None, self)

    def serve(self, models: ModelPool) -> None:
        """Serves ``models`` from now on."""
        self.models = models
        self.recorder.serve_models([entry.name for entry in models.entries], models.budget)

    def serve_loaded(self, model: ServedModel) -> None:
        """Serves a model that is loaded already, and only this one."""
        entry = ModelEntry(ModelPlan(model.name), GivenModel(model))
        self.serve(ModelPool([entry], None, self))
        self.models.add_loaded(entry, model)

    def model_loaded(self, model: ServedModel, seconds: float) -> None:
        """Records the steps of a model's engine from now on; see ``PoolListener``."""
        self.recorder.model_loaded(model.name, model.info, seconds)

        def record(stats: StepStats) -> None:
            self.recorder.record_step(stats, model.name)
            self.live.record_step(stats, model.name)

        model.client.on_step = record

    def load_failed(self, name: str) -> None:
        """See ``PoolListener``."""
        self.recorder.record_load_failure(name)

    def model_unloaded(self, name: str, reason: UnloadReason) -> None:
        """See ``PoolListener``."""
        self.recorder.model_unloaded(name, reason)
        self.live.forget_steps(name)

    def memory_changed(self, used: int) -> None:
        """See ``PoolListener``."""
        self.recorder.record_models_memory(used)

    def record_restart(self, reason: str) -> None:
        """Records a restart of the engine process; ``reason`` is one of the metric's values."""
        self.recorder.record_restart(reason)
        self.live.record_restart()

    @property
    def loaded_models(self) -> Sequence[ServedModel]:
        """The models that are loaded, even if they cannot serve now."""
        return self.models.loaded

    @property
    def loaded(self) -> ServedModel | None:
        """The first of ``loaded_models``, or None."""
        return next(iter(self.models.loaded), None)

    @property
    def model_states(self) -> Mapping[str, str]:
        """The state of every model, by name."""
        return {entry.name: entry.state for entry in self.models.entries}

    @property
    def vision_models(self) -> set[str]:
        """The names of the models that take images, as far as they were loaded once."""
        entries = self.models.entries
        return {entry.name for entry in entries if entry.last and entry.last.vision is not None}

    @property
    def unhealthy(self) -> str | None:
        """The reason why requests cannot be served now, or None."""
        if self.drain.draining:
            return f"draining: {len(self.drain)} requests to finish"
        return self.models.unhealthy if self.models.is_started else self.progress

    def entry(self, name: str | None = None) -> ModelEntry:
        """The model of that name, loaded or not; None means the first.

        Raises:
            NotReady: the models that are loaded at the start are not.
            UnknownModel: the server has no model of that name.
        """
        if not self.models.is_started:
            raise NotReady(f"not ready: {self.unhealthy}")
        return self.models.find(name)

    async def acquire(self, name: str | None, seconds: float | None) -> Lease:
        """Loads the model that a request names, and keeps it loaded.

        Raises:
            NotReady, UnknownModel, QueueFull: as ``entry`` and ``ModelPool.acquire``.
        """
        return await self.models.acquire(self.entry(name), seconds)

    def model(self, name: str | None = None) -> ServedModel:
        """The model that a request names, which has a lease; ``name`` None means the first.

        The name of a LoRA adapter stands for its model with the adapter.

        Raises:
            NotReady: the model is not loaded, or its engine cannot serve.
            UnknownModel: the server has no model of that name.
        """
        entry = self.entry(name)
        if entry.model is None or not entry.model.client.accepts:
            reason = entry.unhealthy or f"the model {entry.name!r} is {entry.state}"
            raise NotReady(f"not ready: {reason}")
        return entry.model if name is None else entry.adapted(name) or entry.model


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
