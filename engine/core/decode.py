"""The decode batch: every row of it gains one token a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity, resize_order
from chairlift.cache.snapshot import Snapshot
from chairlift.engine.sampling.masks import Bits
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplerRow
from chairlift.scheduler.scheduler import Plan
from chairlift.scheduler.sequence import Sequence


class DecodeBatch:
    """The rows, the token that each feeds next, and one batch of caches for each band.

    The tokens stay on the device: a step feeds what the step before sampled, whether the host has
    read it or not. ``rows`` has the rows of the bands, one band after the other, and then those
    that arrive: sequences whose prompt ends in the step. They are sampled with the others, and
    their states are copied into the caches before the next step.
    """

    def __init__(
        self,
        bands: Seq[BatchCache],
        vocabulary: int,
        sampler_row: Callable[[Sequence], SamplerRow],
    ) -> None:
        self.rows: list[Sequence] = []
        self.bands = tuple(bands)
        # The states of the last rows, which have yet to join the caches.
        self.joining: dict[Sequence, Snapshot] = {}
        self._sampler = Sampler(vocabulary)
        self._sampler_row = sampler_row
        self._tokens = mx.zeros((0,), mx.int32)

    @property
    def cached_rows(self) -> int:
        """How many of the rows are in the caches."""
        return sum(map(len, self.bands))

    @property
    def tokens(self) -> mx.array:
        """``[rows of the caches]``: the token ids that they feed next."""
        return self._tokens[: self.cached_rows]

    @property
    def capacities(self) -> tuple[Capacity, ...]:
        """The capacities of the bands' buffers."""
        return tuple(band.capacity for band in self.bands)

    @property
    def offsets(self) -> list[int]:
        """How many tokens each row of the caches has."""
        return [offset for band in self.bands for offset in band.offsets]

    @property
    def total_columns(self) -> int:
        """Columns of all rows in the caches, padding included."""
        return sum(band.capacity.columns * len(band) for band in self.bands)

    @property
    def nbytes(self) -> int:
        """Bytes that the caches take."""
        return sum(band.nbytes for band in self.bands)

    @property
    def queued(self) -> bool:
        """Whether all cache layers are queued; see ``LayerCache.queued``."""
        return all(band.queued for band in self.bands)

    @property
    def states(self) -> list[mx.array]:
        """Recurrent states: evaluate them as well, since no logits of the step depend on them."""
        return [array for band in self.bands for array in band.states]

    def state(self, sequence: Sequence) -> Snapshot:
        """The state of a sequence with a row, or just arrived; it shares the caches' memory."""
        if sequence in self.joining:
            return self.joining[sequence]
        band, row = next((band, row) for band, row, own in self._places() if own is sequence)
        return band.extract(row)

    def places_of(self, leaves: Seq[Sequence]) -> Iterator[tuple[Sequence, BatchCache, int]]:
        """Those of some sequences that have a row in the caches: each with its band and row."""
        if leaves:
            gone = set(leaves)
            for band, row, sequence in self._places():
                if sequence in gone:
                    yield sequence, band, row

    def apply_plan(self, plan: Plan) -> list[mx.array]:
        """Makes the rows those of a plan: some leave, those that arrived join, and some change
        their band. The plan's ``joins`` arrive in this step.

        Returns:
            Arrays to evaluate before the next step is dispatched.
        """
        leaves, bands, joins = set(plan.leaves), plan.decode, list(plan.joins)
        # Nothing is kept of sequences that leave while buffers are moved.
        states = {s: state for s, state in self.joining.items() if s not in leaves}
        self.joining = {}
        moves: list[mx.array] = []
        orders: list[list[int]] = []
        start = 0
        for number, band in enumerate(self.bands):
            own = self.rows[start : start + len(band)]
            out = {row for row, s in enumerate(own) if s in leaves or bands[s] != number}
            moving = {own[row]: band.extract(row).copy() for row in out if own[row] not in leaves}
            states |= moving
            moves += _begun([array for state in moving.values() for array in state.arrays])
            nonfinite = [row for row in out if own[row].nonfinite]
            orders.append([start + row for row in band.leave(out, nonfinite)])
            start += len(own)
            moves += _begun(band.take_moves())
        self._resize(plan.capacities, moves)
        if states:
            for row, sequence in enumerate(self.rows):
                if sequence in states:
                    self.bands[bands[sequence]].join(states[sequence])
                    orders[bands[sequence]].append(row)
        for band in self.bands:
            moves += _begun(band.take_moves())
        order = list(chain(*orders))
        if joins or order != list(range(len(self.rows))):
            self._tokens = self._tokens[mx.array(order, mx.int32)]
            self._sampler.rearrange(order, [self._sampler_row(sequence) for sequence in joins])
            self.rows = [self.rows[row] for row in order] + joins
        return moves

    def _places(self) -> Iterator[tuple[BatchCache, int, Sequence]]:
        """Each row of the caches: its band, its number there, its sequence."""
        places = ((band, row) for band in self.bands for row in range(len(band)))
        for (band, row), sequence in zip(places, self.rows, strict=False):
            yield band, row, sequence

    def sample(self, logits: mx.array, masks: Bits | None = None) -> Sampled:
        """Samples a token for each row, arriving ones included; nothing is computed yet.

        Args:
            logits: ``[rows, vocabulary]``.
            masks: ``[rows, words]``, the tokens each row may choose; None: any.
        """
        sampled = self._sampler.sample(logits, [row.generated for row in self.rows], masks)
        self._tokens = sampled.tokens
        return sampled

    def _resize(self, capacities: Seq[Capacity], moves: Seq[mx.array]) -> None:
        """Replaces the buffers of bands whose capacity changes, one after the other."""
        if tuple(capacities) == self.capacities:
            return
        # Pending moves and a running step hold the old buffers while the new ones are made.
        mx.eval(moves)
        mx.synchronize()
        for number in resize_order(self.capacities, capacities):
            band, capacity = self.bands[number], capacities[number]
            if not capacity.rows:
                band.reset()
            elif capacity != band.capacity:
                band.resize(capacity)


def _begun(arrays: list[mx.array]) -> list[mx.array]:
    """Dispatches arrays at once: queued layers rely on the order of dispatch."""
    mx.async_eval(arrays)
    return arrays
