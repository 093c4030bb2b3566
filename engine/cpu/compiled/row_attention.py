"""Attention of rows with any numbers of new tokens, each computed for its row's columns only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import llvm_kernel
from chairlift.engine.cpu.compiled.compiled_matmul import MIN_SHARED, run_shared
from chairlift.engine.cpu.compiled.llvm_row_attention import MAX_QUERIES
from chairlift.engine.cpu.gemm import Floats


def supports(queries: Floats, keys: NDArray[Any], values: NDArray[Any]) -> bool:
    """Whether there is a kernel, and it reads arrays of this form; see ``attend``."""
    kernel = llvm_kernel.compiled()
    if kernel is None:
        return False
    _, heads, dim = queries.shape
    key_heads = keys.shape[1]
    return (
        keys.dtype == values.dtype == np.float32
        and keys.strides[3] == values.strides[3] == keys.itemsize
        and keys.shape == values.shape
        and keys.shape[3] == dim
        and dim % kernel.outputs == 0
        and heads % key_heads == 0
        and heads // key_heads <= MAX_QUERIES
    )


def attend(
    queries: Floats,
    keys: Floats,
    values: Floats,
    counts: Sequence[int],
    begun: Sequence[int],
    scale: float,
) -> Floats:
    """Causal attention of each row's new tokens to all of its columns, from the first one on.

    Args:
        queries: ``[tokens, heads, dim]``, row by row; see ``supports``.
        keys, values: ``[rows, key heads, columns, dim]``, which contain the new tokens.
        counts: the number of new tokens of each row.
        begun: each row's columns before its new tokens.

    Returns:
        ``[tokens, heads, dim]``.
    """
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    tokens, heads, dim = queries.shape
    rows, key_heads, columns, _ = keys.shape
    assert len(counts) <= rows
    assert sum(counts) == tokens
    assert max(map(add, counts, begun)) <= columns
    steps = [stride // array.itemsize for array in (keys, values) for stride in array.strides[:3]]
    tiles = _tiles(counts, begun, max(1, MAX_QUERIES // (heads // key_heads)))
    scaled = np.multiply(queries, np.float32(scale), order="C")
    result = np.empty((tokens, heads, dim), np.float32)
    run_shared(
        kernel.rows,
        *(array.ctypes.data for array in (scaled, keys, values, result, tiles)),
        *(heads, key_heads, dim, dim, *steps),
        parts=len(tiles) * key_heads,
        is_shared=int(tiles[:, 3].sum()) * key_heads * dim >= MIN_SHARED,
    )
    return result


def _tiles(counts: Sequence[int], begun: Sequence[int], most: int) -> NDArray[np.int64]:
    """The tiles of at most ``most`` tokens; see ``llvm_row_attention``."""
    starts = [*accumulate(counts, initial=0)][:-1]
    tiles = [
        (start + done, min(most, count - done), row, columns + done + 1)
        for row, (start, count, columns) in enumerate(zip(starts, counts, begun, strict=True))
        for done in range(0, count, most)
    ]
    return np.array(tiles, np.int64).reshape(-1, 4)
