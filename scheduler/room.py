"""Whether a prompt more fits: what rows and prompts take, counted once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.bands import Bands, Lengths, number_of
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence

# Rows that change their band in one step: copying more of them would hold up all rows.
MOVES = 2


class _Group(NamedTuple):
    """What a band has to hold, and ``hoped`` is to hold soon."""

    rows: int = 0
    columns: int = 0
    hoped: Capacity = Capacity(0, 0)

    def with_more(self, rows: int, columns: int, ahead: int) -> _Group:
        """The same with so many rows more."""
        hoped = Capacity(self.hoped.rows, max(self.hoped.columns, ahead))
        return _Group(self.rows + rows, max(self.columns, columns), hoped)


class Room:
    """Finds the capacities of a decode batch that ``prefill`` will join, and others after them.

    A step looks at every row once, however many prompts it asks about.

    Args:
        arriving: those of ``decode`` whose state is yet to be copied into rows, and the prompts
            that they come from: what these hold is counted until it has been, as for ``prefill``.
        coming: those that will want a row soon, ``prefill`` or not.
        now: the capacities that the bands have.
        bands: those of the step before, in which each row of ``decode`` has its own.
        moves: rows that may change their band.
    """

    def __init__(
        self,
        limits: Limits,
        decode: Seq[Sequence],
        prefill: Iterable[Sequence],
        arriving: Mapping[Sequence, Sequence],
        coming: Iterable[Sequence],
        now: Seq[Capacity],
        bands: Bands,
        moves: int = MOVES,
    ) -> None:
        self._limits = limits
        self._now = now
        # Rows of the batch once all have joined, and the tokens of those that are there already.
        self.rows = len(decode)
        lengths = Lengths(limits)
        wanted = [s.wanted for s in decode]
        self.context = sum(wanted)
        own = [(s, n, min(s.most, n + limits.ahead)) for s, n in zip(decode, wanted, strict=True)]
        for sequence, tokens, ahead in own:
            lengths.add(ahead, 1, 0 if sequence in arriving else tokens)
        left = limits.max_rows - self.rows
        others = []
        for sequence in coming:
            rows, ahead = min(left, sequence.rows), self._ahead(sequence)
            left -= rows
            others.append((rows, ahead))
            lengths.add(ahead, rows)
        taken = {sequence.band for sequence in decode if sequence not in arriving}
        free = [number for number in range(limits.bands) if number not in taken]
        self.bands = lengths.cut(bands, free)
        # Where each row of ``decode`` is in this step, and bytes of those that are copied there.
        self.places: dict[Sequence, int] = {}
        self.moved = 0
        groups = [_Group()] * limits.bands
        for sequence, tokens, ahead in own:
            place = number_of(self.bands, ahead)
            if place != sequence.band and sequence not in arriving:
                if moves:
                    moves -= 1
                    self.moved += limits.geometry.used([tokens])
                else:
                    place = sequence.band
            self.places[sequence] = place
            groups[place] = groups[place].with_more(1, tokens, ahead)
        for place, group in enumerate(groups):
            groups[place] = group._replace(hoped=Capacity(group.rows, group.hoped.columns))
        for rows, ahead in others:
            place = number_of(self.bands, ahead)
            old = groups[place].hoped
            hoped = Capacity(old.rows + rows, max(old.columns, ahead))
            groups[place] = groups[place]._replace(hoped=hoped)
        self._groups = groups
        self._besides = self.moved + sum(map(self._bytes_of, set(arriving.values())))
        for sequence in prefill:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """A prompt is to be computed, and its choices to join the batch."""
        self.rows += sequence.rows
        self._groups = self._with(sequence)
        self._besides += self._bytes_of(sequence)

    def capacities(self, more: Sequence | None = None) -> tuple[Capacity, ...] | None:
        """What the bands need once all have joined, and ``more``; None if the bytes do not allow.

        Beside others ``more`` must leave a few columns to spare, so that who is admitted is not
        preempted at once.
        """
        groups, besides, spare = self._groups, self._besides, 0
        if more is not None:
            groups, besides = self._with(more), besides + self._bytes_of(more)
            spare = COLUMN_STEP if self.rows else 0
        needs = [Capacity(g.rows, g.columns + spare if g.rows else 0) for g in groups]
        hoped = [
            Capacity(max(need.rows, g.hoped.rows), max(need.columns, g.hoped.columns))
            for need, g in zip(needs, groups, strict=True)
        ]
        return self._limits.choose(needs, hoped, self._now, besides)

    def _with(self, prompt: Sequence) -> list[_Group]:
        ahead = self._ahead(prompt)
        place = number_of(self.bands, ahead)
        groups = list(self._groups)
        groups[place] = groups[place].with_more(prompt.rows, prompt.wanted, ahead)
        return groups

    def _ahead(self, sequence: Sequence) -> int:
        """The columns that it may be given."""
        return min(sequence.most, sequence.wanted + self._limits.ahead)

    def _bytes_of(self, prompt: Sequence) -> int:
        return self._limits.prefill_bytes(Capacity(1, prompt.wanted))
