"""Who shares buffers with whom: rows of like length, so that none is as wide as the longest of all.

A few numbers of columns, the ceilings, cut the rows into bands, each with buffers of its own that
are as wide as its longest row. A band costs operations in every layer: one is opened when it saves
``Limits.band_bytes`` and a good part of what all take, and given up when it saves much less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.limits import Limits

# A band is given up when it saves one over this of what a new one has to save: so bands do not come
# and go with a row or two.
HYSTERESIS = 2
# A new band saves one over this of the bytes that all bands take.
SHARE = 6


class Band(NamedTuple):
    """``number`` says which of the batch's caches it has. Its rows take ``ceiling`` columns at
    most, and more than the ceiling of the band before.
    """

    number: int
    ceiling: int


# By ceiling; the last has none.
Bands = tuple[Band, ...]
ONE_BAND: Bands = (Band(0, sys.maxsize),)


def number_of(bands: Bands, columns: int) -> int:
    """The band that a row of so many columns belongs to."""
    return next(band.number for band in bands if columns <= band.ceiling)


@dataclass(slots=True)
class _Group:
    """Rows up to a power of two, of which the longest takes ``columns``, and the tokens that they
    ``held`` in buffers in the last step.
    """

    ceiling: int
    rows: int = 0
    columns: int = 0
    held: int = 0


class _Part(NamedTuple):
    """The same of neighbouring groups, and what each row takes if all are as wide as the longest."""

    rows: int
    row_bytes: int
    held: int

    def saved(self, beside: _Part) -> int:
        """Bytes by which these rows take less than if they were as wide as longer ones."""
        return self.rows * (beside.row_bytes - self.row_bytes) if beside.rows else 0


class _Cut(NamedTuple):
    """A ceiling more in the ``at``-th band."""

    saved: int
    at: int
    ceiling: int
    low: _Part
    high: _Part


class Lengths:
    """How many rows there are of each length, and will be soon; powers of two are near enough."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._groups: dict[int, _Group] = {}

    def add(self, columns: int, rows: int = 1, held: int = 0) -> None:
        """Counts rows of so many columns each, which have ``held`` tokens in buffers."""
        ceiling = COLUMN_STEP << ((columns - 1) // COLUMN_STEP).bit_length()
        group = self._groups.get(ceiling)
        if group is None:
            group = self._groups[ceiling] = _Group(ceiling)
        group.rows += rows
        group.columns = max(group.columns, columns)
        group.held += held

    def cut(self, bands: Bands, free: Iterable[int]) -> Bands:
        """The bands after ``bands``: one of them given up, or one more, if that is worth it.

        When there may be no more, the least useful makes room for one that is much more so. Of two
        bands that were one, or become one, the one that has more to move keeps its number.

        Args:
            free: numbers that no row has any more.
        """
        if self._limits.bands == 1:
            return bands
        groups = sorted(self._groups.values(), key=lambda group: group.ceiling)
        spans: list[list[_Group]] = []
        for band in bands:
            spans.append([group for group in groups if group.ceiling <= band.ceiling])
            groups = groups[len(spans[-1]) :]
        cuts = (cut for at, span in enumerate(spans) for cut in self._cuts(at, span))
        best = max(cuts, key=lambda cut: cut.saved, default=None)
        gain = best.saved if best else 0
        full = len(bands) >= self._limits.bands
        parts = [self._part(span) for span in spans]
        whole = sum(part.rows * part.row_bytes for part in parts)
        price = max(self._limits.band_bytes, whole // SHARE)
        pairs = enumerate(pairwise(parts))
        least = min(pairs, key=lambda pair: pair[1][0].saved(pair[1][1]), default=None)
        if least is not None:
            at, (low, high) = least
            if low.saved(high) * HYSTERESIS < max(price, gain if full else 0):
                number = bands[at if low.held > high.held else at + 1].number
                return (*bands[:at], Band(number, bands[at + 1].ceiling), *bands[at + 2 :])
        number = next((n for n in free if all(n != band.number for band in bands)), None)
        if best is None or full or number is None or gain < price:
            return bands
        old, ceiling = bands[best.at]
        numbers = (old, number) if best.low.held > best.high.held else (number, old)
        pair = Band(numbers[0], best.ceiling), Band(numbers[1], ceiling)
        return (*bands[: best.at], *pair, *bands[best.at + 1 :])

    def _cuts(self, at: int, span: Seq[_Group]) -> Iterator[_Cut]:
        """All ways to cut a band in two."""
        for middle in range(1, len(span)):
            low, high = self._part(span[:middle]), self._part(span[middle:])
            yield _Cut(low.saved(high), at, span[middle - 1].ceiling, low, high)

    def _part(self, span: Seq[_Group]) -> _Part:
        if not span:
            return _Part(0, 0, 0)
        row_bytes = self._limits.geometry.reserved(Capacity(1, span[-1].columns))
        rows = sum(group.rows for group in span)
        return _Part(rows, row_bytes, sum(group.held for group in span))
