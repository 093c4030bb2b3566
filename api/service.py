"""The state that all handlers share: settings, metrics, and the served model once it is loaded."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.drain import Drain
from chairlift.api.errors import NotReady, UnknownModel
from chairlift.api.observe.canary import Canary
from chairlift.api.observe.live import Live
from chairlift.api.schemas.sampling_defaults import SamplingDefaults
from chairlift.api.settings import ServerSettings
from chairlift.api.version import VERSION
from chairlift.engine.client.adapters import Adapter, AdapterTable
from chairlift.engine.client.interface import EngineClient, TokenStream
from chairlift.engine.messages import ModelInfo, StepStats, Submit
from chairlift.engine.workers.pool import Workers
from chairlift.metrics.recorder import Recorder

if TYPE_CHECKING:
    # It needs the extra "otel".
    from chairlift.api.observe.tracing import Tracing

    # It imports transformers, which takes a second.
    from chairlift.api.text.vocabulary import Vocabulary

# Modules that worker processes import before their first body or grammar.
MODULES = (
    "chairlift.api.anthropic.dialogue",
    "chairlift.api.ollama.dialogue",
    "chairlift.api.responses.dialogue",
    "chairlift.engine.grammar.trial",
)


@dataclass(frozen=True)
class ServedModel:
    """A loaded model.

    Attributes:
        name: the model's id in the API.
        client: submits requests to its engine.
        vocabulary: its tokenizer and chat format.
        canary: replays finished rows, or None.
        root: the model's own name if ``name`` is another, else None.
        defaults: the sampling of requests that give no value of their own.
        created: the time of loading, in Unix seconds.
        seeds: draws the seeds of requests that give none.
        adapters: its LoRA adapters; None if its engine takes none.
        adapter: the LoRA adapter that ``name`` stands for; None for the model itself.
        base: the model that ``adapter`` changes; None for the model itself.
    """

    name: str
    client: EngineClient
    vocabulary: Vocabulary
    canary: Canary | None = None
    root: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))
    seeds: random.Random = field(default_factory=random.Random)
    adapters: AdapterTable | None = None
    adapter: Adapter | None = None
    base: ServedModel | None = None

    @property
    def info(self) -> ModelInfo:
        """The model's properties; a restart of the engine may change ``max_context``."""
        assert self.client.info is not None, "loaded"
        return self.client.info

    def submit(self, request: Submit) -> TokenStream:
        """Submits a user's request, through the canary if there is one."""
        if self.adapter is not None:
            request = msgspec.structs.replace(request, adapter=self.adapter.key)
        return (self.canary or self.client).submit(request)

    @property
    def parent(self) -> str | None:
        """The name of the model that its adapter changes; None for the model itself."""
        return None if self.base is None else self.base.name

    @property
    def adapted(self) -> list[ServedModel]:
        """This model with each of its LoRA adapters, as a model of its own."""
        loaded = () if self.adapters is None else self.adapters.loaded.values()
        return [
            replace(self, name=one.name, adapter=one, base=self, created=one.created)
            for one in loaded
        ]

    def find(self, name: str) -> ServedModel | None:
        """The model of this name: this one, or with the adapter "adapter" or "model:adapter"."""
        if name == self.name:
            return self
        names = (name, name.removeprefix(f"{self.name}:"))
        return next((model for model in self.adapted if model.name in names), None)

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's system fingerprint: it changes with anything that may change a seed's tokens."""
        info = self.info
        facts = (
            *(VERSION, self.name, info.architecture, info.dtype, info.device),
            *(info.kv_bits, info.kv_group_size, self.defaults),
            self.adapter and self.adapter.digest,
        )
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


class Service:
    """The state of one server. Handlers get it from ``request.app[SERVICE]``.

    Handlers use ``settings``, ``model``, ``recorder``, ``live`` and ``workers``. The other
    attributes are for the middlewares and for the server's start and stop.

    Attributes:
        settings: the API process's settings.
        recorder: records metrics.
        live: records what the page at / shows.
        accounts: the API keys and the usage of each.
        workers: processes for slow work, like reading large bodies.
        tracing: records OpenTelemetry traces, or None.
        drain: the running requests, and whether new ones are refused.
        progress: describes the loading while there is no model yet.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.recorder = Recorder()
        self.live = Live()
        self.accounts = Accounts(settings.keys, settings.anonymous)
        self.workers = Workers(MODULES, record=self.recorder.record_job)
        self.tracing: Tracing | None = None
        self.drain = Drain()
        self.progress = "loading the model"
        self._model: ServedModel | None = None

    def model_loaded(self, model: ServedModel) -> None:
        """Serves ``model`` from now on, and records its engine's steps."""
        self.recorder.model_loaded(model.name, model.info)
        model.client.on_step = self._record_step
        self._model = model

    def _record_step(self, stats: StepStats) -> None:
        self.recorder.record_step(stats)
        self.live.record_step(stats)

    def record_restart(self, reason: str) -> None:
        """Records a restart of the engine process; ``reason`` is one of the metric's values."""
        self.recorder.record_restart(reason)
        self.live.record_restart()

    @property
    def loaded(self) -> ServedModel | None:
        """The model, even if it cannot serve now; None while it is loading."""
        return self._model

    @property
    def unhealthy(self) -> str | None:
        """The reason why requests cannot be served now, or None."""
        if self.drain.draining:
            return f"draining: {len(self.drain)} requests to finish"
        return self.progress if self._model is None else self._model.client.unhealthy

    def model(self, name: str | None = None) -> ServedModel:
        """The model that a request names; ``name`` None means the served model.

        Raises:
            NotReady: the model is loading, or its engine cannot serve.
            UnknownModel: the server has no model of that name.
        """
        if self._model is None or not self._model.client.accepts:
            raise NotReady(f"not ready: {self.unhealthy}")
        model = self._model if name is None else self._model.find(name)
        if model is None:
            assert name is not None
            raise UnknownModel(f"the model {name[:200]!r} does not exist", "model")
        return model


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
