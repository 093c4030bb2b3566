"""Updates every metric of the table: one stats object per engine step, one call per HTTP event."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from chairlift.engine.messages import FinishedChoice, ModelInfo, StepStats
from chairlift.metrics.table import ENGINE, MODEL, SERVER, Metric, token_buckets

_MODEL_LABELS = ("model_name", "engine")
_FAMILIES: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
_UPDATES = {"counter": "inc", "gauge": "set", "histogram": "observe"}

# A prometheus family or child: its classes share no useful static type.
Instrument = Any


class Recorder:
    """All metrics of one server, in their own registry.

    The HTTP server's metrics exist from the start, those of the model after ``model_loaded``.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._server = {metric.key: self._family(metric, ()) for metric in SERVER}
        for metric in SERVER:
            for value in metric.values:
                self._server[metric.key].labels(value)
        self._http: dict[tuple[str, str, int], tuple[Instrument, Instrument]] = {}
        self._engine: _EngineMetrics | None = None

    def model_loaded(self, model_name: str, info: ModelInfo) -> None:
        """Creates the metrics of the model, with counters at 0. Called once."""
        assert self._engine is None
        children: dict[str, Instrument] = {}
        for metric in (*MODEL, *ENGINE):
            common = (model_name, "0") if metric in MODEL else ()
            family = self._family(metric, _MODEL_LABELS if common else (), info.max_context)
            for value in metric.values:
                children[f"{metric.key}.{value}"] = family.labels(*common, value)
            if not metric.labels:
                children[metric.key] = family.labels(*common) if common else family
            elif not metric.values:
                children[metric.key] = family  # an info metric: its labels carry the content
        bits = "none" if info.kv_bits is None else info.kv_bits
        facts = (info.dtype, bits, info.kv_limit_bytes, info.kv_bytes_per_token)
        children["cache_config"].labels(
            model_name, "0", *facts, info.max_context, info.max_rows
        ).set(1)
        children["build_info"].labels(
            version("chairlift"), info.architecture, info.dtype, info.device
        ).set(1)
        self._engine = _EngineMetrics(children)

    def record_step(self, stats: StepStats) -> None:
        """Adds one engine step. Only after ``model_loaded``."""
        assert self._engine is not None
        self._engine.record_step(stats)

    def record_prompt(self, n: int, longest: int) -> None:
        """Adds one finished prompt: its number of choices, and the tokens of the longest."""
        assert self._engine is not None
        self._engine.record_prompt(n, longest)

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


class _EngineMetrics:
    """The metrics of the loaded model, every label child resolved."""

    def __init__(self, children: dict[str, Instrument]) -> None:
        self._child = children
        self._copies = [
            copy
            for metric in (*MODEL, *ENGINE)
            if metric.fields
            for copy in _copies(metric, children)
        ]

    def record_step(self, stats: StepStats) -> None:
        child = self._child
        for field, update in self._copies:
            update(getattr(stats, field))
        if stats.kv_limit_bytes:
            child["kv_usage"].set(stats.kv_used_bytes / stats.kv_limit_bytes)
        # As in vLLM, this minus prompt_cached is the number of computed tokens.
        child["prompt_tokens"].inc(stats.prefill_tokens + stats.prefix_hits)
        child["generation_tokens"].inc(
            len(stats.first_token_latencies) + len(stats.inter_token_latencies)
        )
        # Stats without rows only report aborted choices; no step ran.
        if stats.rows or stats.prefill_tokens:
            if tokens := stats.prefill_tokens + stats.decode_tokens:  # 0 if only a replay ran
                child["iteration_tokens"].observe(tokens)
            child["rows"].observe(stats.rows)
            child["step_duration.total"].observe(stats.duration)
            for phase, seconds in stats.phases.items():
                child[f"step_duration.{phase}"].observe(seconds)
            if stats.total_columns:
                child["padding"].observe(stats.padded_columns / stats.total_columns)
        for choice in stats.finished:
            self._record_finished(choice)

    def record_prompt(self, n: int, longest: int) -> None:
        self._child["params_n"].observe(n)
        self._child["request_max_generation"].observe(longest)

    def _record_finished(self, choice: FinishedChoice) -> None:
        child = self._child
        child[f"success.{choice.reason}"].inc()
        child["request_prompt"].observe(choice.prompt_tokens)
        child["request_generation"].observe(choice.generated_tokens)
        child["params_max_tokens"].observe(choice.max_tokens)
        child["e2e"].observe(choice.finished - choice.arrival)
        if choice.scheduled is None:
            child["queue_time"].observe(choice.finished - choice.arrival)
            return
        child["queue_time"].observe(choice.scheduled - choice.arrival)
        child["inference_time"].observe(choice.finished - choice.scheduled)
        child["request_computed"].observe(choice.prompt_tokens - choice.cached_tokens)
        if choice.first_token is None:
            return
        decode = choice.finished - choice.first_token
        child["prefill_time"].observe(choice.first_token - choice.scheduled)
        child["decode_time"].observe(decode)
        if choice.generated_tokens > 1:
            child["tpot"].observe(decode / (choice.generated_tokens - 1))


def _copies(
    metric: Metric, children: dict[str, Instrument]
) -> list[tuple[str, Callable[[Any], None]]]:
    """The StepStats fields that a metric copies, each with the call that takes its value."""
    method = _UPDATES[metric.kind]
    updates: dict[str, Callable[[float], None]] = {
        value: getattr(children[f"{metric.key}.{value}"], method) for value in metric.values
    }
    if len(metric.fields) > 1:
        return list(zip(metric.fields, updates.values(), strict=True))
    (field,) = metric.fields

    def update_labels(numbers: dict[str, float]) -> None:
        for value, number in numbers.items():
            updates[value](number)

    if metric.values:
        return [(field, update_labels)]
    update: Callable[[float], None] = getattr(children[metric.key], method)

    def observe_all(observations: list[float]) -> None:
        for number in observations:
            update(number)

    return [(field, observe_all if metric.kind == "histogram" else update)]
