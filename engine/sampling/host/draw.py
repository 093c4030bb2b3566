"""Draws tokens as ``sampling.draw`` does, by compiled functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.compiled_sampling import (
    Doubles,
    Integers,
    Weights,
    part_length,
    uniform_numbers,
)
from chairlift.engine.cpu.compiled.llvm.sampling.random import BELOW_ONE
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import Scratch
from chairlift.engine.sampling.host.filters import threshold

# Memory for the weights of one row.
_weights = Scratch()


def draw(
    lines: Floats,
    rows: Integers,
    best: Floats,
    likeliest: NDArray[np.int32],
    options: Floats,
    keys: NDArray[np.uint32],
) -> NDArray[np.int32]:
    """One token from each row's distribution: ``[rows]`` int32.

    Args:
        lines: logits, ``[lines, vocabulary]`` float32.
        rows: the line of each row.
        best: each row's highest logit, ``[rows]``.
        likeliest: the token with that logit, ``[rows]``; no filter removes it.
        options: temperature (above 0), top_k, top_p and min_p, ``[4, rows]``.
        keys: see ``Drawing.keys``.
    """
    vocabulary = lines.shape[1]
    temperature, top_k, top_p, min_p = options
    weights = Weights(lines, rows, best, np.float32(1) / temperature)
    least = min_p.copy()
    for row in np.flatnonzero((top_k > 0) | (top_p < 1)).tolist():
        own = _weights.array(np.float32, vocabulary)
        weights.weigh(row, own)
        least[row] = max(threshold(own, int(top_k[row]), float(top_p[row])), min_p[row])
    uniform = uniform_numbers(keys, 1 + part_length(vocabulary))
    parts = _chosen_parts(weights.part_sums(least), uniform[:, :1])
    tokens = weights.race(least, parts, uniform)
    return np.where(tokens < 0, likeliest, tokens).astype(np.int32)


def _chosen_parts(sums: Doubles, uniform: Floats) -> Integers:
    """As ``sampling.draw.chosen_part``: ``[rows]``.

    Args:
        sums: the weight of each part, ``[rows, PARTS]``.
        uniform: ``[rows, 1]``.
    """
    cumulative = sums.cumsum(axis=1)
    total = cumulative[:, -1:]
    point = np.minimum(uniform * total, total * BELOW_ONE)
    some = sums > 0
    reached = (cumulative > point) & some
    heaviest = np.where(some, sums, 0.0).argmax(axis=1)
    parts: Integers = np.where(reached.any(axis=1), reached.argmax(axis=1), heaviest)
    return parts
