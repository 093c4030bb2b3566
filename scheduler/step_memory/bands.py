"""Groups rows of similar length into bands, so that not every row is as wide as the longest.

Each band has a ceiling, its maximum number of columns, and buffers of its own that are as wide as
its longest row. A band costs operations in every layer. So a band is opened only if it saves
``Limits.band_bytes`` and a good share of all bytes, and closed when it saves much less.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import NamedTuple

from chairlift.cache.capacity import COLUMN_STEP, Capacity, KVGeometry
from chairlift.scheduler.limits import Limits

# A band is closed when it saves less than 1/HYSTERESIS of what a new band has to save, so that
# single rows do not open and close bands.
HYSTERESIS = 2
# A new band has to save 1/SHARE of the bytes that all bands take.
SHARE = 6


class Band(NamedTuple):
    """A range of row lengths.

    Attributes:
        number: which of the batch's caches holds its rows.
        ceiling: maximum columns of its rows; they have more than the ceiling of the band before.
    """

    number: int
    ceiling: int


# Ordered by ceiling; the last band has none (``sys.maxsize``).
Bands = tuple[Band, ...]
ONE_BAND: Bands = (Band(0, sys.maxsize),)


def numbers_of(bands: Bands, columns: Iterable[int]) -> list[int]:
    """For each row length in ``columns``, the number of its band."""
    ceilings = [band.ceiling for band in bands]
    numbers = [band.number for band in bands]
    return [numbers[bisect_left(ceilings, length)] for length in columns]


class _Group(NamedTuple):
    """Rows whose lengths round up to the same ceiling, ``COLUMN_STEP`` times a power of two.

    Attributes:
        ceiling: the rounded length.
        columns: the columns of the longest row.
        rows: the number of rows.
        in_batch: how many of them are in buffers already.
    """

    ceiling: int
    columns: int
    rows: int
    in_batch: int


class _Part(NamedTuple):
    """Neighbouring groups taken together as one band.

    Attributes:
        rows: the number of rows.
        row_bytes: bytes of a row as wide as the longest.
        used_columns: columns of the rows in buffers; they are copied if the rows change the band.
    """

    rows: int
    row_bytes: int
    used_columns: int

    def saved(self, wider: _Part) -> int:
        """Bytes that these rows save by not being as wide as the rows of ``wider``."""
        return self.rows * (wider.row_bytes - self.row_bytes) if wider.rows else 0


class _Cut(NamedTuple):
    """A possible cut of the ``at``-th band at ``ceiling`` into the parts ``low`` and ``high``.

    ``saved`` is the bytes that it saves.
    """

    saved: int
    at: int
    ceiling: int
    low: _Part
    high: _Part


def recut(
    bands: Bands,
    columns: Iterable[int],
    in_batch: Iterable[int],
    free: Iterable[int],
    limits: Limits,
) -> Bands:
    """The bands of the next step: closes or opens one band if that is worth it.

    At the maximum number of bands, the least useful one is closed if a much more useful one could
    be opened. When a band is cut, or two are merged, the part with more columns to copy keeps its
    number.

    Args:
        bands: the present bands.
        columns: lengths of all rows, present and upcoming.
        in_batch: lengths of the rows that are in buffers already.
        free: numbers of bands without rows.
        limits: the maximum number of bands, and the bytes that a band has to save.
    """
    if limits.bands == 1:
        return bands
    groups = _grouped(columns, in_batch)
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
        kept = at if parts[at].used_columns > parts[at + 1].used_columns else at + 1
        band = Band(bands[kept].number, bands[at + 1].ceiling)
        return (*bands[:at], band, *bands[at + 2 :])
    unused = (number for number in free if all(number != band.number for band in bands))
    number = next(unused, None)
    if best is None or number is None or full or best.saved < price:
        return bands
    old = bands[best.at]
    low_keeps = best.low.used_columns > best.high.used_columns
    numbers = (old.number, number) if low_keeps else (number, old.number)
    pair = Band(numbers[0], best.ceiling), Band(numbers[1], old.ceiling)
    return (*bands[: best.at], *pair, *bands[best.at + 1 :])


def _grouped(columns: Iterable[int], in_batch: Iterable[int]) -> list[_Group]:
    """Groups rows by the ceiling of their columns."""
    ordered, present = sorted(columns), sorted(in_batch)
    groups: list[_Group] = []
    start = counted = 0
    while start < len(ordered):
        ceiling = _ceiling(ordered[start])
        stop, known = bisect_right(ordered, ceiling), bisect_right(present, ceiling)
        groups.append(_Group(ceiling, ordered[stop - 1], stop - start, known - counted))
        start, counted = stop, known
    return groups


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
    return _Part(rows, row_bytes, sum(group.in_batch * group.columns for group in span))
