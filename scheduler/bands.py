"""Groups rows of similar length into bands, so that not every row is as wide as the longest.

A few numbers of columns, the ceilings, cut the rows into bands, each with buffers of its own that
are as wide as its longest row. A band costs operations in every layer: one is opened when it saves
``Limits.band_bytes`` and a good part of what all take, and given up when it saves much less.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import NamedTuple

from chairlift.cache.capacity import COLUMN_STEP, Capacity, KVGeometry
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


# In the order of their ceilings; the last band has none.
Bands = tuple[Band, ...]
ONE_BAND: Bands = (Band(0, sys.maxsize),)


def numbers_of(bands: Bands, columns: Iterable[int]) -> list[int]:
    """The bands that rows of so many columns belong to."""
    ceilings = [band.ceiling for band in bands]
    numbers = [band.number for band in bands]
    return [numbers[bisect_left(ceilings, own)] for own in columns]


class _Group(NamedTuple):
    """Rows up to a power of two, of which the longest takes ``columns``; so many are ``there``."""

    ceiling: int
    columns: int
    rows: int
    there: int


class _Part(NamedTuple):
    """Neighbouring groups: what each row takes if all are as wide as the longest, and the columns
    that there would be to move.
    """

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


def recut(
    bands: Bands,
    columns: Iterable[int],
    there: Iterable[int],
    free: Iterable[int],
    limits: Limits,
) -> Bands:
    """The bands after ``bands``: one of them given up, or one more, if that is worth it.

    When there may be no more, the least useful makes room for one that is much more so. Of two
    bands that were one, or become one, that with more to move keeps its number.

    Args:
        columns: of all rows that there are, and will be soon.
        there: of those among them that are in buffers.
        free: numbers that no row has any more.
    """
    if limits.bands == 1:
        return bands
    groups = _grouped(columns, there)
    spans: list[Seq[_Group]] = []
    for band in bands:
        spans.append([group for group in groups if group.ceiling <= band.ceiling])
        groups = groups[len(spans[-1]) :]
    parts = [_part(span, limits.geometry) for span in spans]
    cuts = (cut for at, span in enumerate(spans) for cut in _cuts(at, span, limits.geometry))
    best = max(cuts, key=lambda cut: cut.saved, default=None)
    full = len(bands) >= limits.bands
    price = max(limits.band_bytes, sum(part.rows * part.row_bytes for part in parts) // SHARE)
    saved = [low.saved(high) for low, high in pairwise(parts)]
    needed = max(price, best.saved if best and full else 0)
    if saved and min(saved) * HYSTERESIS < needed:
        at = saved.index(min(saved))
        kept = at if parts[at].held > parts[at + 1].held else at + 1
        band = Band(bands[kept].number, bands[at + 1].ceiling)
        return (*bands[:at], band, *bands[at + 2 :])
    unused = (number for number in free if all(number != band.number for band in bands))
    number = next(unused, None)
    if best is None or number is None or full or best.saved < price:
        return bands
    old = bands[best.at]
    numbers = (old.number, number) if best.low.held > best.high.held else (number, old.number)
    pair = Band(numbers[0], best.ceiling), Band(numbers[1], old.ceiling)
    return (*bands[: best.at], *pair, *bands[best.at + 1 :])


def _grouped(columns: Iterable[int], there: Iterable[int]) -> list[_Group]:
    """Groups rows by the ceiling of their columns."""
    ordered = sorted(columns)
    ceilings = [_ceiling(own) for own in ordered]
    rows, held = Counter(ceilings), Counter(map(_ceiling, there))
    longest = dict(zip(ceilings, ordered, strict=True))
    return [_Group(ceiling, own, rows[ceiling], held[ceiling]) for ceiling, own in longest.items()]


def _ceiling(columns: int) -> int:
    return COLUMN_STEP << ((columns - 1) // COLUMN_STEP).bit_length()


def _cuts(at: int, span: Seq[_Group], geometry: KVGeometry) -> Iterator[_Cut]:
    """Yields all ways to cut a band in two."""
    for middle in range(1, len(span)):
        low, high = _part(span[:middle], geometry), _part(span[middle:], geometry)
        yield _Cut(low.saved(high), at, span[middle - 1].ceiling, low, high)


def _part(span: Seq[_Group], geometry: KVGeometry) -> _Part:
    if not span:
        return _Part(0, 0, 0)
    row_bytes = geometry.reserved(Capacity(1, span[-1].columns))
    rows = sum(group.rows for group in span)
    return _Part(rows, row_bytes, sum(group.there * group.columns for group in span))
