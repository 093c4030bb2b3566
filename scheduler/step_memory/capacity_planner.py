"""Decides whether another prompt fits into memory next to the rows and prompts of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import chain, compress, islice

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_memory.bands import Bands, numbers_of, recut

# Rows that may change their band in one step; copying more would delay all rows.
MAX_MOVES = 2


class CapacityPlanner:
    """Implements ``MemoryPlan``: computes the capacities that the bands of the decode batch need.

    Each row is looked at once a step, however many prompts are checked.

    Attributes:
        rows: rows of the batch once all prompts have joined.
        context: tokens of the rows that decode in this step.
        bands: the bands of this step.
        places: the band of each sequence of ``decode`` in this step.
        moved: bytes of the rows that change their band.

    Args:
        limits: the limits to keep.
        decode: the sequences whose rows gain a token.
        prefill: prompts that are being computed; their rows will join the batch.
        joining: the sequences of ``decode`` whose state is not in the batch yet, and the prompt
            that each comes from. The cache of such a prompt counts until the state is copied.
        upcoming: sequences that will need a row soon; may include those of ``prefill``.
        now: the present capacities of the bands.
        bands: the bands of the step before; ``Sequence.band`` refers to them.
        moves: rows that may change their band.
        drafted: tokens that each row may gain in this step besides one.
    """

    def __init__(
        self,
        limits: Limits,
        decode: Seq[Sequence],
        prefill: Iterable[Sequence],
        joining: Mapping[Sequence, Sequence],
        upcoming: Iterable[Sequence],
        now: Seq[Capacity],
        bands: Bands,
        moves: int = MAX_MOVES,
        drafted: int = 0,
    ) -> None:
        self._limits = limits
        self._now = now
        lengths = [s.num_tokens for s in decode]
        self.rows = len(decode)
        self.context = sum(lengths)
        wanted = [length + limits.lookahead_columns for length in lengths]
        columns = list(map(min, wanted, [s.max_total_tokens for s in decode]))
        free_rows = limits.max_rows - self.rows
        upcoming_columns = [self._columns(s) for s in _one_per_row(upcoming, free_rows)]
        in_batch = [s not in joining for s in decode]
        taken = {s.band for s in compress(decode, in_batch)}
        free = (number for number in range(limits.bands) if number not in taken)
        self.bands = recut(
            bands, chain(columns, upcoming_columns), compress(columns, in_batch), free, limits
        )
        self.places = dict(zip(decode, numbers_of(self.bands, columns), strict=True))
        changed = [s for s, place in self.places.items() if s.band != place and s not in joining]
        self.places |= {s: s.band for s in changed[moves:]}
        self.moved = limits.geometry.used(s.num_tokens for s in changed[:moves])
        self._other_bytes = self.moved + sum(s.prompt_bytes for s in set(joining.values()))
        places = list(self.places.values())
        soon = [*places, *numbers_of(self.bands, upcoming_columns)]
        self._needed = _capacities(limits.bands, places, [length + drafted for length in lengths])
        self._expected = _capacities(limits.bands, soon, [*columns, *upcoming_columns])
        for sequence in prefill:
            self.add(sequence, sequence.prompt_bytes)

    def add(self, sequence: Sequence, prompt_bytes: int) -> None:
        """Reserves a prompt's cache of ``prompt_bytes``, and rows for its choices."""
        self.rows += sequence.rows
        self._needed, self._expected = self._with(sequence)
        self._other_bytes += prompt_bytes

    def capacities(
        self, more: Sequence | None = None, prompt_bytes: int = 0
    ) -> tuple[Capacity, ...] | None:
        """The capacities of the bands once all prompts have joined; None if memory is too small.

        Next to other rows ``more`` must leave a few columns to spare, so that an admitted prompt is
        not preempted at once.

        Args:
            more: one more prompt to check.
            prompt_bytes: bytes of that prompt's cache.
        """
        if more is None and not (self.rows or self._other_bytes):
            return (Capacity(0, 0),) * self._limits.bands
        if more is None:
            needed, expected = self._needed, self._expected
            spare, other_bytes = 0, self._other_bytes
        else:
            needed, expected = self._with(more)
            spare = COLUMN_STEP if self.rows else 0
            other_bytes = self._other_bytes + prompt_bytes
        needed = [Capacity(n.rows, n.columns + spare) if n.rows else n for n in needed]
        return self._limits.columns.choose_capacities(needed, expected, self._now, other_bytes)

    def _with(self, prompt: Sequence) -> tuple[list[Capacity], list[Capacity]]:
        """The needed and the expected capacities with one more prompt."""
        if not prompt.rows:
            return self._needed, self._expected
        needed, expected = list(self._needed), list(self._expected)
        columns = self._columns(prompt)
        [place] = numbers_of(self.bands, [columns])
        _widen(needed, place, prompt.rows, prompt.num_tokens)
        _widen(expected, place, 0, columns)
        return needed, expected

    def _columns(self, sequence: Sequence) -> int:
        """The columns that a sequence's row should be given."""
        return min(sequence.max_total_tokens, sequence.num_tokens + self._limits.lookahead_columns)


def _capacities(bands: int, places: Seq[int], columns: Seq[int]) -> list[Capacity]:
    """The capacities of ``bands`` bands for rows given by their band and their columns."""
    rows, longest = Counter(places), [0] * bands
    for place, length in zip(places, columns, strict=True):
        if length > longest[place]:
            longest[place] = length
    return [Capacity(rows[place], length) for place, length in enumerate(longest)]


def _widen(capacities: list[Capacity], place: int, rows: int, columns: int) -> None:
    """Adds ``rows`` rows of ``columns`` columns to the band ``place``."""
    old = capacities[place]
    capacities[place] = Capacity(old.rows + rows, max(old.columns, columns))


def _one_per_row(sequences: Iterable[Sequence], rows: int) -> list[Sequence]:
    """The first sequences, each once per row that it takes, up to ``rows``."""
    return list(islice((s for s in sequences for _ in range(s.rows)), rows))
