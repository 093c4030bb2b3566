"""Decides whether another prompt fits: adds up, once a step, what rows and prompts take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import chain, compress, islice

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.bands import Bands, numbers_of, recut
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence

# How many rows may change their band in one step: copying more would delay all rows.
MOVES = 2


class CapacityPlanner:
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
        lengths = [s.num_tokens for s in decode]
        # Rows of the batch once all have joined, and the tokens of those that are there already.
        self.rows = len(decode)
        self.context = sum(lengths)
        columns = [
            min(s.max_total_tokens, own + limits.lookahead_columns)
            for s, own in zip(decode, lengths, strict=True)
        ]
        others = [self._columns(s) for s in _fitting(coming, limits.max_rows - self.rows)]
        there = [s not in arriving for s in decode]
        taken = {s.band for s in compress(decode, there)}
        free = (number for number in range(limits.bands) if number not in taken)
        self.bands = recut(bands, chain(columns, others), compress(columns, there), free, limits)
        # The band of each row of ``decode`` in this step, and bytes of those that change theirs.
        self.places = dict(zip(decode, numbers_of(self.bands, columns), strict=True))
        changed = [s for s in compress(decode, there) if s.band != self.places[s]]
        self.places |= {s: s.band for s in changed[moves:]}
        self.moved = limits.geometry.used(s.num_tokens for s in changed[:moves])
        self._besides = self.moved + sum(s.prompt_bytes for s in set(arriving.values()))
        places = list(self.places.values())
        soon = [*places, *numbers_of(self.bands, others)]
        self._needs = _held(limits.bands, places, lengths)
        self._hoped = _held(limits.bands, soon, [*columns, *others])
        for sequence in prefill:
            self.add(sequence, sequence.prompt_bytes)

    def add(self, sequence: Sequence, prompt_bytes: int) -> None:
        """Reserves a prompt's cache of ``prompt_bytes``, and rows for its choices."""
        self.rows += sequence.rows
        self._needs, self._hoped = self._with(sequence)
        self._besides += prompt_bytes

    def capacities(
        self, more: Sequence | None = None, prompt_bytes: int = 0
    ) -> tuple[Capacity, ...] | None:
        """What the bands need once all have joined, and ``more``, whose prompt takes
        ``prompt_bytes``; None if the bytes do not allow.

        Beside others ``more`` must leave a few columns to spare, so that who is admitted is not
        preempted at once.
        """
        if more is None and not (self.rows or self._besides):
            return (Capacity(0, 0),) * self._limits.bands
        if more is None:
            needs, hoped, spare, besides = self._needs, self._hoped, 0, self._besides
        else:
            needs, hoped = self._with(more)
            spare = COLUMN_STEP if self.rows else 0
            besides = self._besides + prompt_bytes
        needs = [Capacity(n.rows, n.columns + spare) if n.rows else n for n in needs]
        return self._limits.choose(needs, hoped, self._now, besides)

    def _with(self, prompt: Sequence) -> tuple[list[Capacity], list[Capacity]]:
        """What the bands need with one prompt more, and what is hoped for."""
        if not prompt.rows:
            return self._needs, self._hoped
        needs, hoped, soon = list(self._needs), list(self._hoped), self._columns(prompt)
        [place] = numbers_of(self.bands, [soon])
        _widen(needs, place, prompt.rows, prompt.num_tokens)
        _widen(hoped, place, 0, soon)
        return needs, hoped

    def _columns(self, sequence: Sequence) -> int:
        """The columns that a sequence's row may be given."""
        return min(sequence.max_total_tokens, sequence.num_tokens + self._limits.lookahead_columns)


def _held(bands: int, places: Seq[int], columns: Seq[int]) -> list[Capacity]:
    """The capacities that bands need for rows of these columns at these places."""
    rows, longest = Counter(places), [0] * bands
    for place, own in zip(places, columns, strict=True):
        if own > longest[place]:
            longest[place] = own
    return [Capacity(rows[place], own) for place, own in enumerate(longest)]


def _widen(bands: list[Capacity], place: int, rows: int, columns: int) -> None:
    """Makes room in a band for so many rows more."""
    held = bands[place]
    bands[place] = Capacity(held.rows + rows, max(held.columns, columns))


def _fitting(coming: Iterable[Sequence], rows: int) -> list[Sequence]:
    """The first of the coming sequences, once for each row, up to ``rows``."""
    return list(islice((s for s in coming for _ in range(s.rows)), rows))
