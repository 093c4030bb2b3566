"""The thresholds of ``filters`` by NumPy, row by row, for MLX's CPU backend.

Halving an interval reads the vocabulary 22 or 29 times, by MLX on one thread. Here top_k selects,
and top_p sorts only the tokens that can be above its threshold: often a few hundred. A row's result
does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# The smallest weight that a filter keeps.
SMALLEST = 2.0**-60

Floats = NDArray[np.float32]


def host_thresholds(
    weights: mx.array, top_k: mx.array | None, top_p: mx.array | None, min_p: mx.array | None
) -> mx.array:
    """See ``filters.thresholds``. Evaluates the weights."""
    given = weights, top_k, top_p, min_p
    mx.eval([array for array in given if array is not None])
    view: Floats = np.array(weights, copy=False)
    parameters = zip(
        view,
        _column(top_k, len(view), 0),
        _column(top_p, len(view), 1),
        _column(min_p, len(view), 0),
        strict=True,
    )
    return mx.array([[_threshold(*row)] for row in parameters], mx.float32)


def _column(array: mx.array | None, rows: int, default: float) -> list[float]:
    """A parameter's number for each row."""
    if array is None:
        return [default] * rows
    numbers: Any = array[:, 0].tolist()
    return list(numbers)


def _threshold(weights: Floats, top_k: float, top_p: float, min_p: float) -> float:
    minimum = 0.0
    if top_k > 0:
        minimum = _of_top_k(weights[weights >= SMALLEST], int(top_k))
    if top_p < 1:
        minimum = max(minimum, _of_top_p(weights[weights >= minimum], top_p))
    return max(minimum, min_p)


def _of_top_k(weights: Floats, count: int) -> float:
    """The weight of the last of the ``count`` heaviest tokens."""
    if count > len(weights):
        return SMALLEST
    return float(np.partition(weights, len(weights) - count)[-count])


def _of_top_p(weights: Floats, share: float) -> float:
    """The weight of the last of the fewest heaviest tokens that have this share of all weight."""
    if not len(weights):
        return SMALLEST
    total = weights.sum(dtype=np.float64)
    # All tokens below this threshold together weigh less than the part that is removed.
    start = max((1 - share) * total / len(weights), SMALLEST)
    descending = np.sort(weights[weights >= start])[::-1]
    if not len(descending):
        return SMALLEST
    reached = np.searchsorted(np.cumsum(descending, dtype=np.float64), share * total)
    return float(descending[min(int(reached), len(descending) - 1)])
