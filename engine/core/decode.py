"""The decode batch: each of its rows gets one token per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.capacity import Capacity, resize_order
from chairlift.cache.kinds import Cache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.page import step_size
from chairlift.cache.pages.upload import uploaded_words
from chairlift.cache.snapshot import Snapshot
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.lora_routing import Slot
from chairlift.engine.sampling.choice import SamplingMode
from chairlift.engine.sampling.masks import Bits
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplerRow
from chairlift.scheduler.drafts import FILLER
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.sequence import Sequence


class DecodeBatch:
    """The rows, the next input token of each, and one batch of caches for each band.

    The tokens stay on the device: a step's inputs are the tokens that the previous step sampled,
    even if the host has not read them yet.

    Attributes:
        rows: the rows of the bands, one band after the other, and then the joining rows: sequences
            whose prompt ends in the current step. These are sampled with the others, and their
            states are copied into the caches before the next step.
        bands: the caches.
        joining: the states of the joining rows.
    """

    def __init__(
        self,
        bands: Seq[Cache],
        vocabulary: int,
        sampler_row: Callable[[Sequence], SamplerRow],
        agree: Callable[[mx.array], mx.array],
    ) -> None:
        self.rows: list[Sequence] = []
        self.bands = tuple(bands)
        self.joining: dict[Sequence, Snapshot] = {}
        # Over pages, steps and their sampling have few different sizes, and their numbers are
        # uploaded in another way.
        size = step_size if self.queued else int
        mode = SamplingMode(size, _upload_of(bands), lazy=self.queued)
        self._sampler = Sampler(vocabulary, agree, mode)
        self._sampler_row = sampler_row
        self._tokens = mx.zeros((0,), mx.int32)

    @property
    def cached_rows(self) -> int:
        """The number of rows in the caches."""
        return sum(map(len, self.bands))

    @property
    def tokens(self) -> mx.array:
        """The next input tokens of the rows in the caches: ``[cached_rows]`` int32."""
        return self._tokens[: self.cached_rows]

    def begin_drafts(
        self, drafts: Mapping[Sequence, Seq[int]], adapters: Seq[Slot]
    ) -> list[DraftedBand]:
        """The input tokens of a step with drafts. The step before must have been read.

        Returns:
            One for each band with rows. Call ``commit_drafts`` with them once they are computed.
        """
        drafted = []
        start = 0
        for band in self.bands:
            if rows := self.rows[start : start + len(band)]:
                fed = [_fed(s.tokens[-1], drafts.get(s, ())) for s in rows]
                for sequence in rows:
                    sequence.drafted |= bool(drafts.get(sequence))
                slots = adapters[start : start + len(band)]
                drafted.append(DraftedBand(band, fed, slots))
            start += len(band)
        return drafted

    def commit_drafts(
        self,
        drafted: Seq[DraftedBand],
        outcomes: Seq[Seq[int]],
        commit: Callable[[DraftedBand, Seq[int]], None],
    ) -> None:
        """Keeps the right tokens of each row's draft.

        Args:
            drafted: the result of ``begin_drafts``.
            outcomes: see ``Step.outcomes``.
            commit: see ``Forward.commit``.
        """
        start = 0
        for band in drafted:
            own = outcomes[start : start + len(band.rows)]
            commit(band, [len(kept) for kept in own])
            start += len(own)
        self._sampler.count(outcomes)
        last = np.fromiter((kept[-1] for kept in outcomes), np.int32, len(outcomes))
        self._tokens = mx.array(np.maximum(last, 0))  # a failed row leaves

    @property
    def capacities(self) -> tuple[Capacity, ...]:
        """The capacities of the bands' buffers."""
        return tuple(band.capacity for band in self.bands)

    @property
    def offsets(self) -> list[int]:
        """The number of tokens of each row in the caches."""
        return [offset for band in self.bands for offset in band.offsets]

    @property
    def total_columns(self) -> int:
        """The number of columns of all rows in the caches, including padding."""
        return sum(band.total_columns for band in self.bands)

    @property
    def nbytes(self) -> int:
        """The caches' size in bytes."""
        return sum(band.nbytes for band in self.bands)

    @property
    def occupied(self) -> bool:
        """Whether sequences have rows, or are about to: also those that the next step removes."""
        return bool(self.rows or self.joining)

    @property
    def queued(self) -> bool:
        """Whether a step may be dispatched while the one before still runs."""
        return all(band.queued for band in self.bands)

    @property
    def states(self) -> list[mx.array]:
        """Recurrent states. Evaluate them in each step: its logits do not depend on them."""
        return [array for band in self.bands for array in band.states]

    def state(self, sequence: Sequence) -> Snapshot:
        """The state of a sequence with a row; it shares the caches' memory."""
        if sequence in self.joining:
            return self.joining[sequence]
        band, row = next((band, row) for band, row, other in self._places() if other is sequence)
        return band.extract(row)

    def places_of(self, leaves: Seq[Sequence]) -> Iterator[tuple[Sequence, Cache, int]]:
        """Yields each of these sequences that has a row in the caches, with its band and row."""
        if leaves:
            leaving = set(leaves)
            for band, row, sequence in self._places():
                if sequence in leaving:
                    yield sequence, band, row

    def apply_plan(self, plan: Plan) -> list[mx.array]:
        """Changes the rows to a plan's rows.

        Rows leave, rows that joined in the previous step get a place in the caches, and rows move
        to another band. The plan's ``joins`` become the new joining rows; ``joining`` is empty
        until the caller sets it.

        Returns:
            Arrays to evaluate before the next step is dispatched.
        """
        bands, joins = plan.decode, list(plan.joins)
        # Drop the states of leaving sequences first, to free their memory.
        states = {s: state for s, state in self.joining.items() if s in bands}
        self.joining = {}
        moves: list[mx.array] = []
        orders: list[list[int]] = []
        start = 0
        for number, band in enumerate(self.bands):
            rows = self.rows[start : start + len(band)]
            # Sequences that leave have no band in the plan.
            out = {row for row, place in enumerate(map(bands.get, rows)) if place != number}
            moving = {rows[row]: band.extract(row).copy() for row in out if rows[row] in bands}
            states |= moving
            moves += _dispatched([array for state in moving.values() for array in state.arrays])
            nonfinite = [row for row, s in enumerate(rows) if s.nonfinite or s.drafted]
            left = band.leave(out, nonfinite) if out else range(len(band))
            orders.append([start + row for row in left])
            start += len(rows)
            moves += _dispatched(band.take_moves())
        self._resize(plan.capacities, moves)
        if states:
            for row, sequence in enumerate(self.rows):
                if sequence in states:
                    self.bands[bands[sequence]].join(states[sequence])
                    orders[bands[sequence]].append(row)
        for band in self.bands:
            moves += _dispatched(band.take_moves())
        order = list(chain(*orders))
        if joins or order != list(range(len(self.rows))):
            self._tokens = self._tokens[mx.array(order, mx.int32)]
            self._sampler.rearrange(order, [self._sampler_row(sequence) for sequence in joins])
            self.rows = [self.rows[row] for row in order] + joins
        return moves

    def _places(self) -> Iterator[tuple[Cache, int, Sequence]]:
        """Yields each row in the caches: its band, its number there, its sequence."""
        places = ((band, row) for band in self.bands for row in range(len(band)))
        for (band, row), sequence in zip(places, self.rows, strict=False):
            yield band, row, sequence

    def sample(
        self, logits: mx.array, drafts: Seq[Seq[int]] = (), masks: Bits | None = None
    ) -> Sampled:
        """Builds the graph that samples a token for each row, including joining rows.

        Args:
            logits: ``[rows, vocabulary]``, or with ``drafts`` ``[tokens of rows, vocabulary]``.
            drafts: the draft of each row; empty if no row has one.
            masks: ``[as logits, words]``, the tokens that each line may choose; None allows all.
        """
        counted = self.rows if self._sampler.needs_positions else ()
        generated = [row.generated for row in counted]
        if drafts:
            return self._sampler.sample_drafts(logits, generated, drafts, masks)
        sampled = self._sampler.sample(logits, generated, masks)
        self._tokens = sampled.tokens
        return sampled

    def _resize(self, capacities: Seq[Capacity], moves: Seq[mx.array]) -> None:
        """Replaces the buffers of bands whose capacity changes, one after the other."""
        if tuple(capacities) == self.capacities:
            return
        # Wait first: pending moves and a running step keep the old buffers in memory.
        mx.eval(moves)
        mx.synchronize()
        for number in resize_order(self.capacities, capacities):
            band, capacity = self.bands[number], capacities[number]
            if not capacity.rows:
                band.reset()
            elif capacity != band.capacity:
                band.resize(capacity)


def _fed(last: int, draft: Seq[int]) -> list[int]:
    """A row's input tokens: its last token, and its draft with that token in place of fillers."""
    return [last, *(last if token == FILLER else token for token in draft)]


def _upload_of(bands: Seq[Cache]) -> Callable[[NDArray[np.uint32]], mx.array]:
    """A function that copies numbers to the device of these caches."""
    for band in bands:
        if isinstance(band, PagedBatch):
            return partial(uploaded_words, buffers=band.memory.host)
    return mx.array


def _dispatched(arrays: list[mx.array]) -> list[mx.array]:
    """Dispatches arrays at once, as pages are written in the order of dispatch; returns them."""
    mx.async_eval(arrays)
    return arrays
