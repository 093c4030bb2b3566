"""What a step tells the metrics, read from the parts of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import mlx.core as mx

from chairlift.engine.messages import StepStats
from chairlift.scheduler.scheduler import Plan
from chairlift.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from chairlift.engine.core.core import EngineCore


def count_begun(stats: StepStats, plan: Plan, engine: EngineCore) -> None:
    """Before a plan is built: where what is not computed of the sequences that begin comes from."""
    stats.resumed = {"memory": 0, "disk": 0, "recompute": 0}
    for sequence in users(plan.cached):
        place = engine.swap.place(sequence)
        if sequence.cached is not None:  # it began before
            stats.resumed[place or "recompute"] += 1
        if place is None and engine.prefixes.active and not sequence.apart:
            stats.prefix_queries += len(sequence.tokens)
            stats.prefix_hits += plan.cached[sequence]


def complete(stats: StepStats, plan: Plan, engine: EngineCore) -> None:
    """When a plan has been launched: what it was, and what is there now."""
    batch, scheduler, geometry = engine.batch, engine.scheduler, engine.limits.geometry
    offsets = batch.offsets
    stats.rows = len(offsets)
    stats.running = sum(len(s.choices) for s in users((*scheduler.running, *scheduler.prefilling)))
    stats.waiting = scheduler.waiting.choices
    stats.prefill_tokens = sum(plan.chunks[s] for s in users(plan.chunks))
    stats.decode_tokens = len(users(plan.decode))
    stats.preemptions = len(users(plan.preempted))
    stats.swapped_bytes = {"memory": engine.swap.nbytes, "disk": engine.swap.disk_nbytes}
    engine.prefixes.report(stats)
    stats.grammar_hits, stats.grammar_seconds = engine.grammars.take_counts()
    stats.held_columns = batch.held_columns
    stats.padded_columns = batch.held_columns - sum(offsets)
    stats.kv_reserved_bytes = batch.nbytes + engine.prompts.nbytes
    computed = [sequence.computed for sequence in scheduler.prefilling]
    stats.kv_used_bytes = geometry.used(offsets) + geometry.used(computed)
    stats.kv_limit_bytes = engine.limits.kv_bytes
    stats.memory_active = mx.get_active_memory()
    stats.memory_peak = mx.get_peak_memory()
    stats.memory_cache = mx.get_cache_memory()


def users(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Those that are not the server's own."""
    return [sequence for sequence in sequences if not sequence.replay]
