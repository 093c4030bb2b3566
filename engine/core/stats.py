"""Measures each step: the statistics from which the metrics are made."""

from __future__ import annotations

import time
from collections.abc import Iterable

import mlx.core as mx

from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.decode import DecodeBatch
from chairlift.engine.core.prefill import PrefillBatch
from chairlift.engine.core.prefix_cache import PrefixCache
from chairlift.engine.grammar.pending import Grammars
from chairlift.engine.messages import StepStats
from chairlift.engine.model.vision.encoder import ImageEncoder
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence


class StepRecorder:
    """Collects the stats of one step at a time from all parts of the engine.

    Attributes:
        current: the stats of the current step.
    """

    def __init__(
        self,
        limits: Limits,
        scheduler: Scheduler,
        batch: DecodeBatch,
        prefill: PrefillBatch,
        prefixes: PrefixCache,
        swap: Swap[Sequence],
        grammars: Grammars,
        images: ImageEncoder,
    ) -> None:
        self.current = StepStats()
        self._limits = limits
        self._scheduler = scheduler
        self._batch = batch
        self._prefill = prefill
        self._prefixes = prefixes
        self._swap = swap
        self._grammars = grammars
        self._images = images

    def begin(self, plan: Plan) -> None:
        """Counts the cached tokens of a plan's new sequences. Call it before the plan is built."""
        stats = self.current
        stats.resumed = {"memory": 0, "disk": 0, "recompute": 0}
        for sequence in users(plan.cached):
            place = self._swap.place(sequence)
            if sequence.cached is not None:  # it began before
                stats.resumed[place or "recompute"] += 1
            if place is None and self._prefixes.active and not sequence.bypasses_prefix_cache:
                stats.prefix_queries += len(sequence.tokens)
                stats.prefix_hits += plan.cached[sequence]

    def count_draft(self, proposed: int, accepted: int) -> None:
        """Counts a draft of ``proposed`` tokens, of which the first ``accepted`` are right."""
        stats = self.current
        stats.drafts += 1
        stats.draft_tokens += proposed
        stats.accepted_tokens += [accepted]

    def finish(self, plan: Plan, duration: float) -> StepStats:
        """Completes and returns the stats of a step of ``duration`` seconds; starts the next."""
        stats, self.current = self.current, StepStats()
        batch, scheduler, geometry = self._batch, self._scheduler, self._limits.geometry
        offsets = batch.offsets
        stats.duration = duration
        stats.rows = len(offsets)
        running, prefilling = users(scheduler.running), users(scheduler.prefilling)
        # Each running sequence is one choice.
        stats.running = len(running) + sum(s.num_choices for s in prefilling)
        stats.waiting = scheduler.waiting.choices
        adapted = [s for s in (*running, *prefilling) if s.adapter]
        stats.adapters_running = sum(s.num_choices for s in adapted)
        stats.prefill_tokens = sum(plan.chunks[s] for s in users(plan.chunks))
        drafted = sum(len(plan.drafts[s]) for s in users(plan.drafts))
        stats.decode_tokens = len(users(plan.decode)) + drafted
        stats.preemptions = len(users(plan.preempted))
        stats.swapped_bytes = {"memory": self._swap.nbytes, "disk": self._swap.disk_nbytes}
        self._prefixes.report(stats)
        stats.grammar_hits, stats.grammar_seconds = self._grammars.take_counts()
        encoded = self._images.take_counts()
        stats.image_queries, stats.image_hits = encoded.queries, encoded.hits
        stats.image_seconds, stats.image_bytes = encoded.encoded, self._images.nbytes
        stats.total_columns = batch.total_columns
        stats.padded_columns = stats.total_columns - sum(offsets)
        stats.kv_reserved_bytes = batch.nbytes + self._prefill.nbytes
        computed = [sequence.computed for sequence in scheduler.prefilling]
        stats.kv_used_bytes = geometry.used(offsets) + geometry.used(computed)
        stats.kv_limit_bytes = self._limits.kv_bytes
        stats.memory_active = mx.get_active_memory()
        stats.memory_peak = mx.get_peak_memory()
        stats.memory_cache = mx.get_cache_memory()
        return stats


class PhaseTimer:
    """Adds the seconds between two calls of ``end`` to the named phase."""

    def __init__(self, phases: dict[str, float]) -> None:
        self._phases = phases
        self.start = self._last = time.monotonic()

    @property
    def total(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self._last - self.start

    def end(self, phase: str) -> None:
        """Adds the time since the last call, or since the start, to this phase."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now


def users(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The sequences of users, without the canary's replays."""
    return [sequence for sequence in sequences if not sequence.replay]
