"""The minimum weight that top_k and top_p leave, for one row.

Halving an interval reads the vocabulary 22 or 29 times. Here top_k selects, and top_p sorts only
the tokens that can be at its threshold: often a few hundred.
"""

from __future__ import annotations

import numpy as np

from chairlift.engine.cpu.compiled.llvm.sampling.choice import SMALLEST
from chairlift.engine.cpu.gemm import Floats

_BLOCK = 64


def threshold(weights: Floats, top_k: int, top_p: float) -> float:
    """See ``filters.thresholds``; ``weights`` are ``[vocabulary]``, without NaN."""
    minimum, left = 0.0, weights
    if top_k > 0:
        left = _heavy(weights, top_k)
        minimum = _of_top_k(left, top_k)
        left = _at_least(left, minimum)
    if top_p < 1:
        minimum = max(minimum, _of_top_p(left, top_p))
    return minimum


def _heavy(weights: Floats, count: int) -> Floats:
    """Weights of at least SMALLEST, among them the ``count`` heaviest and those that tie with them.

    Each of the heaviest is in one of as many blocks, so the lightest of these blocks' maxima is not
    above them. A block's tokens are equally far apart, so that NumPy compares whole vectors.
    """
    least = SMALLEST
    blocks = len(weights) // _BLOCK
    if count < blocks:
        maxima = weights[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
        least = max(least, float(np.partition(maxima, blocks - count)[-count]))
    return _at_least(weights, least)


def _at_least(weights: Floats, least: float) -> Floats:
    """The weights that are not lighter. NumPy takes four times as long to index by booleans."""
    return weights[np.flatnonzero(weights >= least)]


def _of_top_k(weights: Floats, count: int) -> float:
    """The weight of the last of the ``count`` heaviest tokens."""
    if count > len(weights):
        return SMALLEST
    return float(np.partition(weights, len(weights) - count)[-count])


def _of_top_p(weights: Floats, share: float) -> float:
    """The weight of the last of the fewest heaviest tokens that have this share of all weight."""
    total = float(weights.sum())
    # All tokens below this threshold together weigh less than the part that is removed.
    start = max((1 - share) * total / max(1, len(weights)), SMALLEST)
    descending = np.sort(_at_least(weights, start))[::-1]
    if not len(descending):
        return SMALLEST
    reached = np.searchsorted(np.cumsum(descending, dtype=np.float64), share * total)
    return float(descending[min(int(reached), len(descending) - 1)])
