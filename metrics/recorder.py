"""Sets every metric of the table: from one stats object a step, and from one call a reply."""

from __future__ import annotations

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

# A prometheus family or child: its classes share no useful static type.
Instrument = Any


class Recorder:
    """All metrics of one server, in a registry of its own.

    The HTTP ones exist at once; those of the model from ``model_loaded`` on.
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
        """Creates the metrics of the model, counters at 0. Called once."""
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
                children[metric.key] = family  # an info metric: its labels are its content
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
        """Adds one prompt that ended: its number of choices, and the longest one's tokens."""
        assert self._engine is not None
        self._engine.record_prompt(n, longest)

    def record_http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Adds one reply. ``route`` and ``method`` are known ones, never what a client made up."""
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
        """Adds one request that was refused; ``reason`` is one of the table's."""
        self._server["rejected"].labels(reason).inc()

    def record_restart(self, reason: str) -> None:
        """Adds one engine process that was started in another's place, for one of the table's
        reasons.
        """
        self._server["restarts"].labels(reason).inc()

    def record_reload(self, outcome: str) -> None:
        """Adds one attempt to read keys or the certificate again: "success" or "failure"."""
        self._server["reloads"].labels(outcome).inc()

    def record_canary(self, diverged: bool) -> None:
        """Adds one finished row that was compared with its replay."""
        self._server["canary_checked"].inc()
        if diverged:
            self._server["canary_diverged"].inc()

    def record_disconnect(self) -> None:
        """Adds one client that left before its reply was complete."""
        self._server["disconnects"].inc()

    def record_lag(self, seconds: float) -> None:
        """Adds how late the event loop was once."""
        self._server["loop_lag"].observe(seconds)

    def record_job(self, outcome: str) -> None:
        """Adds one job of the worker processes; ``outcome`` is one of the table's."""
        self._server["worker_jobs"].labels(outcome).inc()

    def _family(self, metric: Metric, common: tuple[str, ...], most: int = 1) -> Instrument:
        options: dict[str, object] = {}
        if metric.kind == "histogram":
            tokens = metric.buckets == "tokens"
            options["buckets"] = token_buckets(most) if tokens else metric.buckets
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

    def record_step(self, stats: StepStats) -> None:
        child = self._child
        child["running"].set(stats.running)
        child["waiting"].set(stats.waiting)
        if stats.kv_limit_bytes:
            child["kv_usage"].set(stats.kv_used_bytes / stats.kv_limit_bytes)
        child["kv_bytes.reserved"].set(stats.kv_reserved_bytes)
        child["kv_bytes.used"].set(stats.kv_used_bytes)
        child["kv_bytes.prefix"].set(stats.prefix_bytes)
        child["prefix_queries"].inc(stats.prefix_queries)
        child["prefix_hits"].inc(stats.prefix_hits)
        child["prefix_evictions"].inc(stats.prefix_evictions)
        self._record_store(stats)
        child["grammar_hits"].inc(stats.grammar_hits)
        for seconds in stats.grammar_seconds:
            child["grammar_seconds"].observe(seconds)
        for reason, rows in stats.rows_failed.items():
            child[f"rows_failed.{reason}"].inc(rows)
        child["memory.active"].set(stats.memory_active)
        child["memory.peak"].set(stats.memory_peak)
        child["memory.cache"].set(stats.memory_cache)
        child["preemptions"].inc(stats.preemptions)
        for source, rows in stats.resumed.items():
            child[f"resumed.{source}"].inc(rows)
        for place, nbytes in stats.swapped_bytes.items():
            child[f"swapped_bytes.{place}"].set(nbytes)
        # As in vLLM, the difference of these two is what was computed.
        child["prompt_tokens"].inc(stats.prefill_tokens + stats.prefix_hits)
        child["prompt_cached"].inc(stats.prefix_hits)
        child["generation_tokens"].inc(
            len(stats.first_token_latencies) + len(stats.inter_token_latencies)
        )
        # Stats without rows only report that choices were aborted, not that a step ran.
        if stats.rows or stats.prefill_tokens:
            if tokens := stats.prefill_tokens + stats.decode_tokens:  # none of a replay's
                child["iteration_tokens"].observe(tokens)
            child["rows"].observe(stats.rows)
            child["step_duration.total"].observe(stats.duration)
            for phase, seconds in stats.phases.items():
                child[f"step_duration.{phase}"].observe(seconds)
            if stats.held_columns:
                child["padding"].observe(stats.padded_columns / stats.held_columns)
        for seconds in stats.first_token_latencies:
            child["ttft"].observe(seconds)
        observe = child["itl"].observe
        for seconds in stats.inter_token_latencies:
            observe(seconds)
        for choice in stats.finished:
            self._record_finished(choice)

    def _record_store(self, stats: StepStats) -> None:
        child = self._child
        for event, files in stats.store_files.items():
            child[f"store_files.{event}"].inc(files)
        for direction, nbytes in stats.store_io_bytes.items():
            child[f"store_io_bytes.{direction}"].inc(nbytes)
        child["store_read_seconds"].inc(stats.store_read_seconds)
        for place, nbytes in stats.store_bytes.items():
            child[f"store_bytes.{place}"].set(nbytes)

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
