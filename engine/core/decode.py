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
    """Rows of sequences, the token each feeds next, and their caches, a batch for each band.

    The tokens stay on the device: a step feeds what the one before sampled, read or not. Behind
    the rows of the bands, one band after the other, come those that arrive: sequences whose prompt
    ends in the step, which are sampled with the others and have their states copied in before the
    next.
    """

    def __init__(
        self,
        bands: Seq[BatchCache],
        vocabulary: int,
        sampler_row: Callable[[Sequence], SamplerRow],
    ) -> None:
        self.rows: list[Sequence] = []
        self.bands = tuple(bands)
        # What each of the last rows takes with it, for those that have yet to join the caches.
        self.arriving: dict[Sequence, Snapshot] = {}
        self._sampler = Sampler(vocabulary)
        self._sampler_row = sampler_row
        self._tokens = mx.zeros((0,), mx.int32)

    @property
    def held(self) -> int:
        """How many of the rows are in the caches."""
        return sum(map(len, self.bands))

    @property
    def tokens(self) -> mx.array:
        """``[rows of the caches]``, what they feed next."""
        return self._tokens[: self.held]

    @property
    def capacities(self) -> tuple[Capacity, ...]:
        """Of the bands' buffers."""
        return tuple(band.capacity for band in self.bands)

    @property
    def offsets(self) -> list[int]:
        """Tokens that each row of the caches holds."""
        return [offset for band in self.bands for offset in band.offsets]

    @property
    def held_columns(self) -> int:
        """Columns of the caches' rows, whether they hold a token or not."""
        return sum(band.capacity.columns * len(band) for band in self.bands)

    @property
    def nbytes(self) -> int:
        """Bytes that the caches take."""
        return sum(band.nbytes for band in self.bands)

    @property
    def queued(self) -> bool:
        """Whether all layers are; see ``LayerCache.queued``."""
        return all(band.queued for band in self.bands)

    @property
    def states(self) -> list[mx.array]:
        """Recurrent states, which nothing of a step's logits need depend on: to be evaluated."""
        return [array for band in self.bands for array in band.states]

    def state(self, sequence: Sequence) -> Snapshot:
        """Of one that has a row, or has just arrived; it shares the caches' memory."""
        if sequence in self.arriving:
            return self.arriving[sequence]
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
        states = {s: state for s, state in self.arriving.items() if s not in leaves}
        self.arriving = {}
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
        """A token for each row, those that arrive included; nothing is computed yet.

        Args:
            logits: ``[rows, vocabulary]``.
            masks: ``[rows, words]``, what each row may choose; None: anything.
        """
        sampled = self._sampler.sample(logits, [row.generated for row in self.rows], masks)
        self._tokens = sampled.tokens
        return sampled

    def _resize(self, capacities: Seq[Capacity], moves: Seq[mx.array]) -> None:
        """Gives the bands other buffers, one after the other, if they need any."""
        if tuple(capacities) == self.capacities:
            return
        # Else they would keep the old buffers while the new ones are made, as would a running step.
        mx.eval(moves)
        mx.synchronize()
        for number in resize_order(self.capacities, capacities):
            band, capacity = self.bands[number], capacities[number]
            if not capacity.rows:
                band.reset()
            elif capacity != band.capacity:
                band.resize(capacity)


def _begun(arrays: list[mx.array]) -> list[mx.array]:
    """The same on their way to the device: where layers are queued, in the order that counts."""
    mx.async_eval(arrays)
    return arrays
