"""The decode batch: every row of it gains one token a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.snapshot import Snapshot
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplerRow
from chairlift.scheduler.sequence import Sequence


class DecodeBatch:
    """Rows of sequences, the token each feeds next, and their caches.

    The tokens stay on the device: a step feeds what the one before sampled, read or not.
    """

    def __init__(
        self,
        model: Any,
        cache: BatchCache,
        vocabulary: int,
        sampler_row: Callable[[Sequence], SamplerRow],
    ) -> None:
        self.rows: list[Sequence] = []
        self.cache = cache
        self._model = model
        self._sampler = Sampler(vocabulary)
        self._sampler_row = sampler_row
        self._tokens = mx.zeros((0,), mx.int32)

    def leaving(self, wanted: Seq[Sequence]) -> Iterator[tuple[Sequence, Snapshot]]:
        """The rows that are not ``wanted`` any more, and what their caches hold."""
        staying = set(wanted)
        for row, sequence in enumerate(self.rows):
            if sequence not in staying:
                yield sequence, self.cache.extract(row)

    def arrange(
        self, wanted: Seq[Sequence], capacity: Capacity, states: Mapping[Sequence, Snapshot]
    ) -> list[mx.array]:
        """Makes the rows those of ``wanted``: the others leave, those of ``states`` join.

        Returns:
            Arrays to evaluate before the next step is dispatched.
        """
        staying = set(wanted)
        leaving = {row for row, sequence in enumerate(self.rows) if sequence not in staying}
        if not leaving and not states:
            self._resize(capacity)
            return []
        order = self.cache.leave(leaving)
        moves = self.cache.take_moves()
        self._resize(capacity)
        for state in states.values():
            self.cache.join(state)
        first = mx.array([sequence.tokens[-1] for sequence in states], mx.int32)
        self._tokens = mx.concatenate([self._tokens[mx.array(order, mx.int32)], first])
        self._sampler.rearrange(order, [self._sampler_row(sequence) for sequence in states])
        self.rows = [self.rows[row] for row in order] + list(states)
        return moves

    def step(self) -> Sampled:
        """Builds one step of all rows; nothing is computed yet."""
        with self.cache.step(1):
            logits = self._model(self._tokens[:, None], cache=self.cache.layers)[:, -1]
        sampled = self._sampler.sample(logits, [row.generated for row in self.rows])
        self._tokens = sampled.tokens
        return sampled

    def _resize(self, capacity: Capacity) -> None:
        if capacity == self.cache.capacity:
            return
        if capacity.rows:
            self.cache.resize(capacity)
        else:
            self.cache.reset()
