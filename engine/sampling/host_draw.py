"""Chooses tokens and adds up probabilities by NumPy, row by row, for MLX's CPU backend.

MLX computes an exponential function and a maximum on the CPU ten times as slowly as NumPy, and its
operations read all tokens also after top_k, top_p and min_p have left a few. A row's token does not
depend on other rows. A draw's choice is that of ``draw.sample_categorical``.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.sampling.draw import BELOW_ONE, MIN_TIME, PARTS
from chairlift.engine.sampling.host_filters import SMALLEST, threshold

# The exponential of this is below SMALLEST, the least weight that is not 0.
_LOWEST = np.float32(-42)


def host_highest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Each row's likeliest token and its logit; of a row with NaN a NaN. Evaluates the logits.

    Args:
        logits: ``[rows, vocabulary]`` float32.

    Returns:
        ``[rows]`` int32 and ``[rows, 1]`` float32.
    """
    lines = view(logits)
    tokens = lines.argmax(axis=1).astype(np.int32)
    return mx.array(tokens), mx.array(np.take_along_axis(lines, tokens[:, None], axis=1))


def host_soundness(raw: mx.array) -> tuple[mx.array, mx.array]:
    """As ``outcomes.soundness``. Evaluates the logits."""
    highest = view(raw).max(axis=1)  # NaN if any number is
    return mx.array(highest < np.inf), mx.array(highest > -np.inf)


def host_draw(
    logits: mx.array,
    best: mx.array,
    likeliest: mx.array,
    temperature: mx.array,
    filters: tuple[mx.array | None, mx.array | None, mx.array | None],
    uniform: mx.array,
) -> mx.array:
    """One token from each row's distribution: ``[rows]`` int32. Evaluates the logits.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        best: ``[rows, 1]``, each row's highest logit.
        likeliest: ``[rows]`` int32, the token with that logit; no filter removes it.
        temperature: ``[rows, 1]``.
        filters: top_k, top_p and min_p, each ``[rows, 1]``, or None where no row has it.
        uniform: see ``draw.uniform_numbers``.
    """
    mx.eval(logits, best, likeliest, uniform)
    rows = len(logits)
    off = zip(filters, (0.0, 1.0, 0.0), strict=True)
    options = [[none] * rows if one is None else view(one)[:, 0] for one, none in off]
    lines = zip(view(logits), view(best)[:, 0], view(temperature)[:, 0], strict=True)
    numbers, tokens = view(uniform), view(likeliest).copy()
    weights = np.empty(logits.shape[1], np.float32)
    # Rows whose logits are not finite get a failure code later.
    with np.errstate(all="ignore"):
        for row, (line, highest, heat) in enumerate(lines):
            _set_weights(weights, line, highest, heat)
            least = threshold(weights, *(float(option[row]) for option in options))
            drawn = _drawn(weights, least, numbers[row])
            if drawn is not None:
                tokens[row] = drawn
    return mx.array(tokens)


def host_log_totals(logits: mx.array, highest: mx.array) -> mx.array:
    """The logarithm of each row's sum of exponentials: ``[rows, 1]`` float32. Evaluates the logits.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        highest: ``[rows, 1]``, each row's highest logit.
    """
    mx.eval(logits, highest)
    weights = np.empty(logits.shape[1], np.float32)
    totals = view(highest).copy()
    with np.errstate(all="ignore"):
        for line, total in zip(view(logits), totals, strict=True):
            _set_weights(weights, line, total[0], np.float32(1))
            total += np.log(weights.sum())
    return mx.array(totals)


def _set_weights(weights: Floats, logits: Floats, highest: np.float32, heat: np.float32) -> None:
    """Computes ``exp((logits - highest) / heat)``; what is below SMALLEST becomes 0."""
    # The highest logit is subtracted first, so that nothing overflows at any temperature.
    np.subtract(logits, highest, out=weights)
    if heat != 1:
        np.divide(weights, heat, out=weights)
    # Numbers below the normal ones take a CPU ten times as long.
    np.exp(np.maximum(weights, _LOWEST, out=weights), out=weights)
    np.multiply(weights, weights >= SMALLEST, out=weights)


def _drawn(weights: Floats, least: float, uniform: Floats) -> int | None:
    """A token whose weight is at least ``least`` and above 0; None if there is none."""
    length = -(-len(weights) // PARTS)
    if least > 0:
        kept = np.flatnonzero(weights >= least)
        own = weights[kept]
        sums = np.bincount(kept // length, own, PARTS)
    else:
        starts = np.arange(0, len(weights), length)
        sums = np.add.reduceat(weights, starts, dtype=np.float64)
    cumulative = np.cumsum(sums)
    total = cumulative[-1]
    reached = (cumulative > min(uniform[0] * total, total * BELOW_ONE)) & (sums > 0)
    part = int(reached.argmax() if reached.any() else np.where(sums > 0, sums, 0.0).argmax())
    first = part * length
    if least > 0:
        inside = slice(*np.searchsorted(kept, (first, first + length)))
        places, own = kept[inside] - first, own[inside]
    else:
        own = weights[first : first + length]
        places = np.arange(len(own))
    if not len(own):
        return None
    times = np.maximum(-np.log1p(-uniform[1 + places]), np.float32(MIN_TIME))
    speeds = np.where(own > 0, own / times, -1.0)
    winner = int(speeds.argmax())
    return first + int(places[winner]) if own[winner] > 0 else None
