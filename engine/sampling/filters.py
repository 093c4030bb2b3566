"""top_k, top_p and min_p: each becomes a minimum probability of a token.

Halving an interval around the threshold reads memory less often than sorting the vocabulary on a
GPU. A small top_k in every row needs neither. On the CPU ``host.filters`` is faster, and on CUDA
one kernel (``engine.cuda.sampling``).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from chairlift.engine.cpu.compiled.llvm.sampling.choice import SMALLEST
from chairlift.engine.sampling.top import largest

# The bits of non-negative floats, read as integers, have the order of the floats, so the search
# bisects integers. A halving for top_p sums the vocabulary, so top_p stops at a relative precision
# of 4e-6. A halving for top_k only counts, so top_k continues to the last bit.
TOP_P_HALVINGS = 22
TOP_K_HALVINGS = 29
# With a top_k of at most this in every row, the largest weights are sorted.
SMALL_TOP_K = 128


def thresholds(
    weights: mx.array,
    top_k: mx.array | None,
    top_p: mx.array | None,
    min_p: mx.array | None,
    largest_k: int = 0,
) -> mx.array:
    """The minimum weight of a token to be sampled, for each row.

    The filters apply in order: top_k, then top_p to the remaining tokens, then min_p.

    Args:
        weights: ``[rows, vocabulary]`` float32, probabilities up to a factor: the largest weight
            of each row is 1.
        top_k: ``[rows, 1]``, 0 for off. For each filter, None means off for all rows.
        top_p: ``[rows, 1]``, 1 for off.
        min_p: ``[rows, 1]``, 0 for off.
        largest_k: the largest top_k, if it is on in all rows; else 0.

    Returns:
        ``[rows, 1]``. Tokens that tie with the last included one are included as well.
    """
    if top_k is not None and 0 < largest_k <= SMALL_TOP_K:
        return small_thresholds(weights, top_k, top_p, min_p, largest_k)
    return halved_thresholds(weights, top_k, top_p, min_p)


def halved_thresholds(
    weights: mx.array, top_k: mx.array | None, top_p: mx.array | None, min_p: mx.array | None
) -> mx.array:
    """As ``thresholds``, lazily, by operations that any device has."""
    minimum = mx.zeros((weights.shape[0], 1), mx.float32)
    if top_k is not None:
        kept = _largest(
            minimum + SMALLEST,
            TOP_K_HALVINGS,
            lambda t: (weights >= t).sum(axis=-1, keepdims=True) >= top_k,
        )
        minimum = mx.where(top_k > 0, kept, minimum)
    if top_p is not None:
        left = mx.where(weights >= minimum, weights, 0.0)
        total = left.sum(axis=-1, keepdims=True)
        # All tokens below this threshold together weigh less than the part that top_p removes.
        start = mx.maximum((1 - top_p) * total / weights.shape[1], SMALLEST)
        kept = _largest(
            mx.minimum(start, 1.0),
            TOP_P_HALVINGS,
            lambda t: ((left >= t) * left).sum(axis=-1, keepdims=True) >= top_p * total,
        )
        minimum = mx.where(top_p < 1, mx.maximum(kept, minimum), minimum)
    if min_p is not None:
        minimum = mx.maximum(minimum, min_p)
    return minimum


def _largest(start: mx.array, halvings: int, enough: Callable[[mx.array], mx.array]) -> mx.array:
    """Each row's largest threshold from ``start`` to 1 for which ``enough`` is true.

    ``start``, and the argument and result of ``enough``, are ``[rows, 1]``.
    """
    low = start.view(mx.int32)
    high = mx.ones(start.shape, mx.float32).view(mx.int32)
    for _ in range(halvings):
        middle = low + (high - low + 1) // 2
        fits = enough(middle.view(mx.float32))
        low = mx.where(fits, middle, low)
        high = mx.where(fits, high, middle - 1)
    return low.view(mx.float32)


def small_thresholds(
    weights: mx.array,
    top_k: mx.array,
    top_p: mx.array | None,
    min_p: mx.array | None,
    largest_k: int,
) -> mx.array:
    """As ``thresholds``, lazily, with a top_k from 1 to ``largest_k`` in every row."""
    _, ordered = largest(weights, min(largest_k, weights.shape[1]))
    last = mx.minimum(top_k.astype(mx.int32), ordered.shape[1]) - 1
    minimum = mx.maximum(mx.take_along_axis(ordered, last, axis=-1), SMALLEST)
    if top_p is not None:
        above = mx.where(ordered > minimum, ordered, 0.0)
        # Tokens that tie with the last one are kept, and may be in other blocks.
        ties = (weights == minimum).sum(axis=-1, keepdims=True)
        total = above.sum(axis=-1, keepdims=True) + ties * minimum
        reached = above.cumsum(axis=-1) >= top_p * total
        nucleus = mx.where(above > 0, above, minimum)
        kept = mx.take_along_axis(nucleus, mx.argmax(reached, axis=-1, keepdims=True), axis=-1)
        kept = mx.where(reached.any(axis=-1, keepdims=True), kept, minimum)
        minimum = mx.where(top_p < 1, mx.maximum(kept, minimum), minimum)
    return minimum if min_p is None else mx.maximum(minimum, min_p)
