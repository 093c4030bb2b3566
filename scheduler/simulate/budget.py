"""Checks the limits of every step, with sums computed independently of the scheduler."""

from __future__ import annotations

from collections import Counter

from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import NO_CAPACITY, Plan
from chairlift.scheduler.sequence import Sequence


class Budget:
    """The maximum rows, tokens and bytes of KV that any step has taken so far.

    The bytes are the sum of the decode batch's buffers at their peak while they are resized, the
    caches of prompts, and the copies that the step makes of joining prompts and of rows that
    change their band.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows = self.step_tokens = self.kv_bytes = 0
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
        moved = limits.geometry.moved_bands(self._capacities, plan.capacities)
        changed = [
            s.num_tokens for s, band in plan.decode.items() if self._bands.get(s, band) != band
        ]
        copied = limits.geometry.used(changed)
        kv_bytes = moved + copied + sum(prompts.values()) + self._joining_bytes
        for band, band_rows in Counter(plan.decode.values()).items():
            assert band_rows <= plan.capacities[band].rows, (band_rows, plan.capacities[band])
        for sequence, band in plan.decode.items():
            assert sequence.num_tokens <= plan.capacities[band].columns, plan.capacities[band]
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
