"""Updates the metrics of one model from its engine's step statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chairlift.engine.messages import FinishedChoice, StepStats
from chairlift.metrics.table import ENGINE, MODEL, Metric

_UPDATES = {"counter": "inc", "gauge": "set", "histogram": "observe"}

# A prometheus family or child: its classes share no useful static type.
Instrument = Any


class ModelRecorder:
    """The metrics of one model and its engine, every label child resolved."""

    def __init__(self, children: Mapping[str, Instrument]) -> None:
        self._child = children
        self._copies = [
            copy
            for metric in (*MODEL, *ENGINE)
            if metric.fields
            for copy in _copies(metric, children)
        ]

    def record_step(self, stats: StepStats) -> None:
        """Adds one engine step."""
        child = self._child
        for field, update in self._copies:
            update(getattr(stats, field))
        # Without a limit there is no engine now, so no KV memory either.
        limit = stats.kv_limit_bytes
        child["kv_usage"].set(stats.kv_used_bytes / limit if limit else 0)
        # As in vLLM, this minus prompt_cached is the number of computed tokens.
        child["prompt_tokens"].inc(stats.prefill_tokens + stats.prefix_hits)
        child["generation_tokens"].inc(stats.output_tokens)
        child["spec_accepted"].inc(sum(stats.accepted_tokens))
        for position in range(max(stats.accepted_tokens, default=0)):
            drafts = sum(accepted > position for accepted in stats.accepted_tokens)
            child[f"spec_accepted_per_pos.{position}"].inc(drafts)
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
        """Adds one finished prompt; see ``Recorder.record_prompt``."""
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
        last_token = choice.finished if choice.last_token is None else choice.last_token
        child["inference_time"].observe(last_token - choice.scheduled)
        child["request_computed"].observe(choice.prompt_tokens - choice.cached_tokens)
        if choice.first_token is None:
            return
        decode = last_token - choice.first_token
        child["prefill_time"].observe(choice.first_token - choice.scheduled)
        child["decode_time"].observe(decode)
        if choice.generated_tokens > 1:
            child["tpot"].observe(decode / (choice.generated_tokens - 1))


def _copies(
    metric: Metric, children: Mapping[str, Instrument]
) -> list[tuple[str, Callable[[Any], None]]]:
    """The StepStats fields that a metric copies, each with the call that takes its value."""
    method = _UPDATES[metric.kind]
    updates: dict[str, Callable[[float], None]] = {
        value: getattr(children[f"{metric.key}.{value}"], method) for value in metric.values
    }
    if len(metric.fields) > 1:
        return list(zip(metric.fields, updates.values(), strict=True))
    (field,) = metric.fields

    def add_labels(numbers: dict[str, float]) -> None:
        for value, number in numbers.items():
            updates[value](number)

    def set_labels(numbers: dict[str, float]) -> None:
        # Stats of an engine that is gone have no numbers, and its gauges must not stay.
        for value, update in updates.items():
            update(numbers.get(value, 0))

    if metric.values:
        return [(field, set_labels if metric.kind == "gauge" else add_labels)]
    child = children[metric.key]
    return [(field, child.observe_all if metric.kind == "histogram" else getattr(child, method))]
