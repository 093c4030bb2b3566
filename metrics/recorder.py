"""Updates every metric of the table: one stats object per engine step, one call per HTTP event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)

from chairlift.engine.messages import ModelInfo, StepStats
from chairlift.metrics.histogram import Histogram
from chairlift.metrics.model_recorder import Instrument, ModelRecorder
from chairlift.metrics.table import ENGINE, MODEL, SERVER, Metric, token_buckets

_MODEL_LABELS = ("model_name", "engine")
_FAMILIES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
# Histograms of tokens share their buckets between models, whose contexts are not known before.
_LONGEST_CONTEXT = 1_000_000


class Recorder:
    """All metrics of one server, in their own registry.

    The HTTP server's metrics exist from the start, those of a model after its first load. If the
    server has several models, the engine's metrics have the label model_name, too.

    Args:
        version: the server's.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._server = {metric.key: self._family(metric, ()) for metric in SERVER}
        for metric in SERVER:
            for value in metric.values if len(metric.labels) == 1 else ():
                self._server[metric.key].labels(value)
        self._http: dict[tuple[str, str, int], tuple[Instrument, Instrument]] = {}
        self._families: dict[str, Instrument] = {}
        self._models: dict[str, ModelRecorder] = {}
        self._cache_config: dict[str, tuple[str, ...]] = {}
        self._has_several = False

    def serve_models(self, names: Sequence[str], budget: int | None) -> None:
        """Creates the metrics of these models' loads, with counters at 0. Called once."""
        self._has_several = len(names) > 1
        for metric in SERVER:
            for value in metric.values if metric.labels[:1] == ("model_name",) else ():
                for name in names:
                    self._server[metric.key].labels(name, value)
        for name in names:
            self._server["model_loaded"].labels(name).set(0)
        self._server["models_memory"].labels("budget").set(budget or 0)

    def model_loaded(self, model_name: str, info: ModelInfo, seconds: float = 0.0) -> None:
        """Creates the metrics of a model the first time, and notes that it is loaded."""
        if model_name not in self._models:
            self._models[model_name] = ModelRecorder(self._children(model_name, info))
        bits = "none" if info.kv_bits is None else info.kv_bits
        facts = (info.dtype, bits, info.kv_limit_bytes, info.kv_bytes_per_token)
        labels = (model_name, "0", *map(str, (*facts, info.max_context, info.max_rows)))
        config = self._families["cache_config"]
        if self._cache_config.get(model_name, labels) != labels:
            config.remove(*self._cache_config[model_name])
        self._cache_config[model_name] = labels
        config.labels(*labels).set(1)
        build = (self._version, info.architecture, info.dtype, info.device)
        self._families["build_info"].labels(*self._engine_labels(model_name), *build).set(1)
        self._server["model_loads"].labels(model_name, "success").inc()
        self._server["model_load_seconds"].labels(model_name).set(seconds)
        self._server["model_loaded"].labels(model_name).set(1)

    def _children(self, model_name: str, info: ModelInfo) -> Mapping[str, Instrument]:
        """The instruments of one model, by key and label value."""
        children: dict[str, Instrument] = {}
        longest = _LONGEST_CONTEXT if self._has_several else info.max_context
        for metric in (*MODEL, *ENGINE):
            common = (model_name, "0") if metric in MODEL else self._engine_labels(model_name)
            if metric.key not in self._families:
                names = _MODEL_LABELS[: len(common)]
                self._families[metric.key] = self._family(metric, names, longest)
            family = self._families[metric.key]
            for value in metric.values_for(info.limits.draft_tokens):
                children[f"{metric.key}.{value}"] = family.labels(*common, value)
            if not metric.labels:
                children[metric.key] = family.labels(*common) if common else family
        return children

    def _engine_labels(self, model_name: str) -> tuple[str, ...]:
        return (model_name,) if self._has_several else ()

    def record_load_failure(self, model_name: str) -> None:
        """Adds one load that failed."""
        self._server["model_loads"].labels(model_name, "failure").inc()

    def model_unloaded(self, model_name: str, reason: str) -> None:
        """Notes that a model was unloaded; ``reason`` is one of the table's values."""
        self._server["model_unloads"].labels(model_name, reason).inc()
        self._server["model_loaded"].labels(model_name).set(0)
        # Its gauges show the state of an engine that is gone.
        self._models[model_name].record_step(StepStats())

    def record_models_memory(self, used: int) -> None:
        """Sets the bytes of the budget that loaded models take."""
        self._server["models_memory"].labels("used").set(used)

    def record_step(self, stats: StepStats, model_name: str | None = None) -> None:
        """Adds one engine step of a loaded model; None means the only one."""
        self._model(model_name).record_step(stats)

    def record_prompt(self, n: int, longest: int, model_name: str | None = None) -> None:
        """Adds one finished prompt: its number of choices, and the tokens of the longest."""
        self._model(model_name).record_prompt(n, longest)

    def _model(self, name: str | None) -> ModelRecorder:
        return next(iter(self._models.values())) if name is None else self._models[name]

    def record_http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Adds one reply. ``route`` and ``method`` must be known ones, never the client's text."""
        key = (route, method, status)
        pair = self._http.get(key)
        if pair is None:
            pair = (
                self._server["http_requests"].labels(*key),
                self._server["http_duration"].labels(route),
            )
            self._http[key] = pair
        pair[0].inc()
        pair[1].observe(seconds)

    def record_rejected(self, reason: str) -> None:
        """Adds one refused request; ``reason`` is one of the table's values."""
        self._server["rejected"].labels(reason).inc()

    def record_restart(self, reason: str) -> None:
        """Adds one restart of the engine process; ``reason`` is one of the table's values."""
        self._server["restarts"].labels(reason).inc()

    def record_reload(self, outcome: str) -> None:
        """Adds one attempt to reload keys or the certificate: "success" or "failure"."""
        self._server["reloads"].labels(outcome).inc()

    def record_canary(self, diverged: bool) -> None:
        """Adds one finished row that was compared with its replay (the canary)."""
        self._server["canary_checked"].inc()
        if diverged:
            self._server["canary_diverged"].inc()

    def record_disconnect(self) -> None:
        """Adds one client that disconnected before its reply was complete."""
        self._server["disconnects"].inc()

    def record_lag(self, seconds: float) -> None:
        """Adds one measured delay of the event loop."""
        self._server["loop_lag"].observe(seconds)

    def record_job(self, outcome: str) -> None:
        """Adds one job of the worker processes; ``outcome`` is one of the table's values."""
        self._server["worker_jobs"].labels(outcome).inc()

    def record_batch(self, status: str) -> None:
        """Adds one batch that ended; ``status`` is one of the table's values."""
        self._server["batches"].labels(status).inc()

    def record_batch_request(self, outcome: str) -> None:
        """Adds one request of a batch; ``outcome`` is "completed" or "failed"."""
        self._server["batch_requests"].labels(outcome).inc()

    def record_batches_running(self, number: int) -> None:
        """Sets the number of batches that are running."""
        self._server["batches_running"].set(number)

    def record_batch_requests_running(self, change: int) -> None:
        """Adds ``change`` to the number of requests of batches that are running."""
        self._server["batch_requests_running"].inc(change)

    def _family(self, metric: Metric, common: tuple[str, ...], longest: int = 1) -> Instrument:
        options: dict[str, object] = {}
        if metric.kind == "histogram":
            tokens = metric.buckets == "tokens"
            options["buckets"] = token_buckets(longest) if tokens else metric.buckets
        return _FAMILIES[metric.kind](
            metric.name,
            metric.help,
            labelnames=(*common, *metric.labels),
            registry=self.registry,
            **options,
        )
