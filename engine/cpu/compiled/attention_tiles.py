"""The tiles of a step's attention, which threads take one by one; see ``llvm.row_attention``."""

from __future__ import annotations

import functools
import threading
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.llvm.row_attention.kernel import MAX_QUERIES, TILE
from chairlift.engine.cpu.compiled.llvm.row_attention.splits import BESIDE, SPLIT

_local = threading.local()


class Form(NamedTuple):
    """The properties of a layer that its tiles depend on.

    Attributes:
        group: query heads that share a key head.
        key_heads: key heads.
        width: numbers of a value.
    """

    group: int
    key_heads: int
    width: int


class Tiles(NamedTuple):
    """Tiles of a step.

    Attributes:
        array: ``[tiles, TILE]``, an address in each of which may point to ``memory``.
        address: of the array.
        seen: columns of all tiles.
        memory: the results of splits, and counters of those that have ended.
    """

    array: NDArray[np.int64]
    address: int
    seen: int
    memory: tuple[NDArray[np.float32], NDArray[np.int64]]


@functools.lru_cache(maxsize=8)
def tiles_of(
    counts: tuple[int, ...],
    begun: tuple[int, ...],
    starts: tuple[int, ...],
    form: Form,
    thread: int,
) -> Tiles:
    """The tiles of rows: for each key head, as many tokens as possible and ``SPLIT`` columns.

    Cached, because all layers of a step have the same.

    Args:
        counts, begun, starts: see ``row_attention.attend``.
        thread: the calling thread. Others may compute at the same time, so their memory differs.
    """
    most = max(1, MAX_QUERIES // form.group)
    firsts = [*accumulate(counts, initial=0)][:-1]
    whole = [
        (first + done, min(most, count - done), row, columns + done + 1, start)
        for row, (first, count, columns, start) in enumerate(
            zip(firsts, counts, begun, starts, strict=True)
        )
        for done in range(0, count, most)
    ]
    array = np.array(whole, np.int64).reshape(-1, 5)
    tokens, seen = array[:, 1], array[:, 3]
    # For each head of these, one split after the other: so a thread that takes several tiles reads
    # adjacent columns.
    heads = form.key_heads
    splits = np.repeat(-(-(seen + tokens - 1) // SPLIT), heads)
    sizes = np.where(splits > 1, splits, 0) * np.repeat(tokens, heads)
    sizes *= form.group * (form.width + BESIDE)
    results, counters = _results(int(sizes.sum())), np.zeros(len(splits), np.int64)
    each = np.repeat(np.arange(len(splits)), splits)
    numbers = np.arange(len(each)) - np.repeat(np.cumsum(splits) - splits, splits)
    tiles = np.column_stack(
        [
            *(array[each // heads], each % heads, SPLIT * numbers, splits[each]),
            results.ctypes.data + results.itemsize * (np.cumsum(sizes) - sizes)[each],
            counters.ctypes.data + counters.itemsize * each,
        ]
    )
    assert tiles.shape[1] == TILE
    assert tiles.dtype == np.int64
    return Tiles(tiles, tiles.ctypes.data, int(seen.sum()), (results, counters))


def _results(size: int) -> NDArray[np.float32]:
    """Memory for at least ``size`` numbers, the same for all calls of a thread: jobs that are
    computed one after the other may share it. A larger one replaces it, but tiles keep their own.
    """
    known: NDArray[np.float32] | None = getattr(_local, "results", None)
    if known is None or known.size < size:
        known = _local.results = np.empty(2 * size, np.float32)
    return known
