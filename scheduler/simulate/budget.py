"""What steps take of the limits, counted apart from the scheduler."""

from __future__ import annotations

from collections import Counter

from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import NOTHING, Plan
from chairlift.scheduler.sequence import Sequence


class Budget:
    """The most rows, tokens and bytes of KV that a step has taken so far.

    Bytes are those of the decode batch's buffers, while they move from the capacities of the step
    before to the plan's, of the caches that prompts have of their own, and of those whose tokens
    are copied into their rows in the step: prompts, and rows that change their band.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows = self.step_tokens = self.kv_bytes = 0
        self._prompts: dict[Sequence, int] = {}
        self._arriving = 0
        self._capacities = [NOTHING] * limits.bands
        self._bands: dict[Sequence, int] = {}

    def launch(self, plan: Plan) -> None:
        """Counts a plan that is about to be committed.

        Raises:
            AssertionError: it takes more than the limits allow.
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
        held = moved + copied + sum(prompts.values()) + self._arriving
        for band, taken in Counter(plan.decode.values()).items():
            assert taken <= plan.capacities[band].rows, (taken, plan.capacities[band])
        for sequence, band in plan.decode.items():
            assert sequence.num_tokens <= plan.capacities[band].columns, plan.capacities[band]
        assert rows <= limits.max_rows, (rows, limits)
        assert step_tokens <= limits.max_step_tokens, (step_tokens, limits)
        assert held <= limits.kv_bytes, (held, limits)
        self.rows = max(self.rows, rows)
        self.step_tokens = max(self.step_tokens, step_tokens)
        self.kv_bytes = max(self.kv_bytes, held)
        self._capacities = list(plan.capacities)
        self._bands = plan.decode
        for sequence in plan.ends.values():
            del prompts[sequence]
        self._arriving = sum(prompts.pop(sequence) for sequence in plan.joins.values())
