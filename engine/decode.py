"""The decode batch: every row of it gains one token a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.snapshot import Snapshot
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplerRow
from chairlift.scheduler.sequence import Sequence


class DecodeBatch:
    """Rows of sequences, the token each feeds next, and their caches.

    The tokens stay on the device: a step feeds what the one before sampled, read or not. Behind
    the rows of the caches come those that arrive: sequences whose prompt ends in the step, which
    are sampled with the others and have their states copied in before the next.
    """

    def __init__(
        self, cache: BatchCache, vocabulary: int, sampler_row: Callable[[Sequence], SamplerRow]
    ) -> None:
        self.rows: list[Sequence] = []
        self.cache = cache
        # What each of the last rows takes with it, for those that have yet to join the caches.
        self.arriving: dict[Sequence, Snapshot] = {}
        self._sampler = Sampler(vocabulary)
        self._sampler_row = sampler_row
        self._tokens = mx.zeros((0,), mx.int32)

    @property
    def tokens(self) -> mx.array:
        """``[rows of the cache]``, what they feed next."""
        return self._tokens[: len(self.cache)]

    def state(self, sequence: Sequence) -> Snapshot:
        """Of one that has a row, or has just arrived; it shares the caches' memory."""
        if sequence in self.arriving:
            return self.arriving[sequence]
        return self.cache.extract(self.rows.index(sequence))

    def leaving(self, wanted: Seq[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """The sequences of the caches that are not ``wanted`` any more, and their rows."""
        staying = set(wanted)
        for row, sequence in enumerate(self.rows[: len(self.cache)]):
            if sequence not in staying:
                yield sequence, row

    def arrange(
        self, wanted: Seq[Sequence], capacity: Capacity, joins: Seq[Sequence]
    ) -> list[mx.array]:
        """Makes the rows those of ``wanted``: the others leave, those that arrived join. ``joins``
        arrive in this step.

        Returns:
            Arrays to evaluate before the next step is dispatched.
        """
        staying = set(wanted)
        held = len(self.cache)
        leaving = {row for row in range(held) if self.rows[row] not in staying}
        order = self.cache.leave(leaving)
        moves = self.cache.take_moves()
        mx.async_eval(moves)
        self._resize(capacity)
        for row in range(held, len(self.rows)):
            if self.rows[row] in staying:
                self.cache.join(self.arriving[self.rows[row]])
                order.append(row)
        self.arriving = {}
        puts = self.cache.take_moves()
        mx.async_eval(puts)
        if joins or order != list(range(len(self.rows))):
            self._tokens = self._tokens[mx.array(order, mx.int32)]
            self._sampler.rearrange(order, [self._sampler_row(sequence) for sequence in joins])
            self.rows = [self.rows[row] for row in order] + list(joins)
        return moves + puts

    def sample(self, logits: mx.array) -> Sampled:
        """A token for each row, those that arrive included; nothing is computed yet.

        Args:
            logits: ``[rows, vocabulary]``.
        """
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
