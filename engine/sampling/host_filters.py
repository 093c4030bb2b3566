"""The thresholds of ``filters`` by NumPy, row by row, for MLX's CPU backend.

Halving an interval reads the vocabulary 22 or 29 times, by MLX on one thread. Here top_k selects,
and top_p sorts only the tokens that can be above its threshold: often a few hundred. A row's result
does not depend on other rows.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view

# The smallest weight that a filter keeps.
SMALLEST = 2.0**-60


def host_thresholds(
    weights: mx.array, top_k: mx.array | None, top_p: mx.array | None, min_p: mx.array | None
) -> mx.array:
    """See ``filters.thresholds``. Evaluates the weights."""
    off = zip((top_k, top_p, min_p), (0, 1, 0), strict=True)
    columns = [np.full(len(weights), none) if one is None else view(one)[:, 0] for one, none in off]
    rows = zip(view(weights), *columns, strict=True)
    return mx.array([[_threshold(*row)] for row in rows], mx.float32)


def _threshold(weights: Floats, top_k: float, top_p: float, min_p: float) -> float:
    minimum = 0.0
    if top_k > 0:
        minimum = _of_top_k(weights[weights >= SMALLEST], int(top_k))
    if top_p < 1:
        minimum = max(minimum, _of_top_p(weights[weights >= minimum], top_p))
    return max(minimum, float(min_p))


def _of_top_k(weights: Floats, count: int) -> float:
    """The weight of the last of the ``count`` heaviest tokens."""
    if count > len(weights):
        return SMALLEST
    return float(np.partition(weights, len(weights) - count)[-count])


def _of_top_p(weights: Floats, share: float) -> float:
    """The weight of the last of the fewest heaviest tokens that have this share of all weight."""
    total = weights.sum(dtype=np.float64)
    # All tokens below this threshold together weigh less than the part that is removed.
    start = max((1 - share) * total / max(1, len(weights)), SMALLEST)
    descending = np.sort(weights[weights >= start])[::-1]
    if not len(descending):
        return SMALLEST
    reached = np.searchsorted(np.cumsum(descending, dtype=np.float64), share * total)
    return float(descending[min(int(reached), len(descending) - 1)])
