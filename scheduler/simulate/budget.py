"""Checks the limits of every step, with sums computed independently of the scheduler."""

from __future__ import annotations

from collections import Counter

from chairlift.cache.capacity import rounded_up
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.sequence import Sequence


class Budget:
    """The maximum rows, tokens and bytes of KV that any step has taken so far.

    The bytes of columns are the sum of the decode batch's buffers at their peak while they are
    resized, the caches of prompts, and the copies that the step makes of joining prompts and of
    rows that change their band. The bytes of pages are those of rows and of whole prompts.

    Attributes:
        columns: the columns of the last step's rows, with padding.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows = self.step_tokens = self.kv_bytes = self.columns = 0
        self._prompts: dict[Sequence, int] = {}
        self._joining_bytes = 0
        self._capacities = [NO_CAPACITY] * limits.bands
        self._bands: dict[Sequence, int] = {}

    def launch(self, plan: Plan) -> None:
        """Counts a plan that is about to be committed.

        Raises:
            AssertionError: the plan exceeds a limit.
        """
        limits, prompts = self.limits, self._prompts
        for sequence in plan.preempted:
            prompts.pop(sequence, None)
        for sequence in plan.cached:
            prompts[sequence] = limits.prompt_bytes(sequence.num_tokens, plan.cached[sequence])
        rows = len(plan.decode) + sum(sequence.rows > 0 for sequence in prompts)
        step_tokens = len(plan.decode) + plan.prefill_tokens
        kv_bytes = self._page_bytes(plan) if limits.paged else self._column_bytes(plan)
        assert rows <= limits.max_rows, (rows, limits)
        assert step_tokens <= limits.max_step_tokens, (step_tokens, limits)
        assert kv_bytes <= limits.kv_bytes, (kv_bytes, limits)
        self.rows = max(self.rows, rows)
        self.step_tokens = max(self.step_tokens, step_tokens)
        self.kv_bytes = max(self.kv_bytes, kv_bytes)
        self._capacities = list(plan.capacities)
        self._bands = plan.decode
        for sequence in plan.ends.values():
            del prompts[sequence]
        self._joining_bytes = sum(prompts.pop(sequence) for sequence in plan.joins.values())

    def _column_bytes(self, plan: Plan) -> int:
        """Bytes of a plan's buffers and caches."""
        geometry = self.limits.geometry
        moved = geometry.moved_bands(self._capacities, plan.capacities)
        changed = [
            s.num_tokens for s, band in plan.decode.items() if self._bands.get(s, band) != band
        ]
        for band, band_rows in Counter(plan.decode.values()).items():
            assert band_rows <= plan.capacities[band].rows, (band_rows, plan.capacities[band])
        for sequence, band in plan.decode.items():
            assert sequence.num_tokens <= plan.capacities[band].columns, plan.capacities[band]
        self.columns = sum(plan.capacities[band].columns for band in plan.decode.values())
        prompts = sum(self._prompts.values()) + self._joining_bytes
        return moved + geometry.used(changed) + prompts

    def _page_bytes(self, plan: Plan) -> int:
        """Bytes of a plan's pages."""
        limits, geometry = self.limits, self.limits.geometry
        assert limits.pages is not None
        lengths = [sequence.num_tokens for sequence in plan.decode]
        self.columns = sum(rounded_up(length, PAGE_TOKENS) for length in lengths)
        total = (len(lengths) + len(self._prompts)) * geometry.row_bytes
        for window, pool in limits.pages.pages.items():
            spans = [(length - 1, length) for length in lengths]
            for sequence in self._prompts:
                begun = plan.cached.get(sequence, sequence.computed)
                end = begun + plan.chunks.get(sequence, 0)
                spans.append((begun, sequence.num_tokens if window is None else end))
            used = sum(_pages(begin, end, window) for begin, end in spans)
            assert used < pool, (used, window, limits)  # page 0 is not used
            size = geometry.full_bytes if window is None else geometry.window_bytes[window]
            total += used * PAGE_TOKENS * size
        return total


def _pages(begin: int, end: int, window: int | None) -> int:
    """Pages of the positions before ``end`` that the queries from ``begin`` on see."""
    first = 0 if window is None else max(0, begin - (window - 1))
    return -(-end // PAGE_TOKENS) - first // PAGE_TOKENS
