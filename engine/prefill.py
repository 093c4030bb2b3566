"""Prefill: prompts are computed in a batch of their own, then handed over as row states.

Only keys and values come of it: a prompt's last token is fed by the decode batch, so that sampling
happens in one place, and no logits are ever computed here (MLX computes nothing nobody asks for).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.snapshot import Snapshot
from chairlift.engine.prefixes import Prefixes
from chairlift.scheduler.scheduler import Plan
from chairlift.scheduler.sequence import Sequence


class Prefilled(NamedTuple):
    """What a chunk gave: the states of all that may join the decode batch now, or buffers that
    the step has to compute although nobody reads them yet.
    """

    states: dict[Sequence, Snapshot]
    written: list[mx.array]


class Prefill:
    """The prompts under way: one in several chunks, or several that fit one chunk."""

    def __init__(
        self, model: Any, make_cache: Callable[[], BatchCache], prefixes: Prefixes
    ) -> None:
        self._model = model
        self._make_cache = make_cache
        self._prefixes = prefixes
        self._cache: BatchCache | None = None
        self._rows: list[Sequence] = []

    @property
    def nbytes(self) -> int:
        """Bytes its caches take between two steps."""
        return self._cache.nbytes if self._cache else 0

    def run(self, plan: Plan) -> Prefilled:
        """Builds a plan's chunk; nothing is computed yet."""
        if self._rows != plan.prefill:
            self._cache = None  # another prompt's turn, or this one was aborted
        self._rows = list(plan.prefill)
        if not plan.prefill:
            return Prefilled({}, [])
        cache = self._cache = self._cache or self._begin(plan)
        real = [plan.chunk(sequence) for sequence in plan.prefill]
        if plan.columns:
            chunks = [
                s.tokens[start : start + n] + [0] * (plan.columns - n)
                for s, start, n in zip(plan.prefill, cache.offsets, real, strict=True)
            ]
            with cache.step(plan.columns, real):
                self._model(mx.array(chunks, mx.int32), cache=cache.layers)
        states = {sequence: cache.extract(row) for row, sequence in enumerate(plan.prefill)}
        if self._prefixes.active:
            for sequence, state in states.items():
                self._prefixes.keep(sequence, state)
        kept = self._prefixes.take_pending()
        ready = {s: state for s, state in states.items() if plan.completes(s)}
        if ready:
            self._cache = None
            self._rows = []
        joining = {choice: ready[sequence] for choice, sequence in plan.joins.items()}
        return Prefilled(joining, kept if ready else [*kept, *cache.state])

    def _begin(self, plan: Plan) -> BatchCache:
        """A cache exactly as large as these prompts will need, with what is cached of them."""
        cache = self._make_cache()
        longest = max(s.to_prefill for s in plan.prefill)
        cache.resize(Capacity(len(plan.prefill), max(1, longest)), step=max(1, plan.columns))
        for sequence in plan.prefill:
            cache.join(self._prefixes.state(sequence, plan.cached[sequence]), columns=longest)
        return cache
