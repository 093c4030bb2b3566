"""Attention of rows with any numbers of new tokens, each computed for its row's columns only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import llvm_kernel
from chairlift.engine.cpu.compiled.compiled_matmul import MIN_SHARED, run_shared
from chairlift.engine.cpu.compiled.llvm_row_attention import MAX_QUERIES
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view


def supports(heads: int, key_heads: int, dim: int) -> bool:
    """Whether there is a kernel, and it computes heads of this form."""
    kernel = llvm_kernel.compiled()
    return (
        kernel is not None
        and dim % kernel.outputs == 0
        and heads % key_heads == 0
        and heads // key_heads <= MAX_QUERIES
    )


def attend(
    queries: Floats,
    keys: mx.array,
    values: mx.array,
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
    key_heads = keys.shape[1]
    stored = view(keys), view(values)
    steps = [stride // 4 for array in stored for stride in array.strides[:3]]
    tiles = _tiles(counts, begun, max(1, MAX_QUERIES // (heads // key_heads)))
    scaled = np.multiply(queries, np.float32(scale), order="C")
    result = np.empty((tokens, heads, dim), np.float32)
    run_shared(
        kernel.rows,
        *(array.ctypes.data for array in (scaled, *stored, result, tiles)),
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
