"""The largest numbers of long rows, without sorting or partitioning them whole."""

from __future__ import annotations

import mlx.core as mx

_BLOCK = 64
# The lowest number that is finite.
_LOWEST = -3.4028234663852886e38


def largest(numbers: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The places of each row's ``k`` largest numbers, and those numbers, the largest first.

    They are in the ``k`` blocks of a row with the largest maxima, so only these blocks are sorted.
    On a CPU equal numbers are in the order of their places, so that the first one does not depend
    on ``k``.

    Args:
        numbers: ``[rows, length]`` float32, without NaN.
        k: from 1 to ``length``.

    Returns:
        ``[rows, k]`` uint32, and ``[rows, k]`` float32.
    """
    rows, length = numbers.shape
    padded = mx.pad(numbers, [(0, 0), (0, -length % _BLOCK)], constant_values=-mx.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    count = blocks.shape[1]
    if k < count:
        # MLX's sorts on a CPU keep the order of equal numbers, and a GPU partitions by sorting.
        best = mx.sort(mx.argsort(-blocks.max(axis=-1), axis=-1)[:, :k], axis=-1)
        blocks = mx.take_along_axis(blocks, best[:, :, None], axis=1)
    else:
        best = mx.broadcast_to(mx.arange(count, dtype=mx.uint32), (rows, count))
    places = best[:, :, None] * _BLOCK + mx.arange(_BLOCK, dtype=mx.uint32)
    chosen, places = blocks.reshape(rows, -1), places.reshape(rows, -1)
    # What was added to fill the last block comes last, even after numbers of -inf.
    ranked = mx.where(places < length, mx.maximum(chosen, _LOWEST), -mx.inf)
    order = mx.argsort(-ranked, axis=-1)[:, :k]
    return mx.take_along_axis(places, order, axis=-1), mx.take_along_axis(chosen, order, axis=-1)
