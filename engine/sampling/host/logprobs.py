"""Log-probabilities by compiled functions and NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.compiled_sampling import Highest, Integers, Weights
from chairlift.engine.cpu.gemm import Floats

_BLOCK = 64


class HostLogprobs(NamedTuple):
    """As ``sampling.logprobs.TopLogprobs``, in NumPy."""

    chosen: Floats
    top_ids: NDArray[np.int32]
    top: Floats


def host_logprobs(
    lines: Floats, rows: Integers, best: Highest, tokens: Integers, k: int
) -> HostLogprobs:
    """The log-probabilities of one token of each row, and of the ``k`` most likely ones.

    Args:
        lines: logits, ``[lines, vocabulary]`` float32.
        rows: the line of each row.
        best: the highest logits of all lines, and their tokens.
        tokens: ``[rows]``.
        k: from 0 to ``vocabulary``.

    Returns:
        NaN where a row's logits are not finite.
    """
    values = best.values[rows]
    ones, zeros = np.ones(len(rows), np.float32), np.zeros(len(rows), np.float32)
    with np.errstate(all="ignore"):  # rows whose logits are not finite
        sums = Weights(lines, rows, values, ones).part_sums(zeros).sum(axis=1)
        # Subtract the highest logit first: its sum with a small logarithm would lose digits.
        logs = np.log(sums).astype(np.float32)
        chosen = lines[rows, tokens] - values - logs
        if k <= 1:
            first, score = best.places[rows, None], (values - values - logs)[:, None]
            return HostLogprobs(chosen, first[:, :k], score[:, :k])
        top = np.stack([_largest(lines[row], k) for row in rows])
        scores = lines[rows[:, None], top] - values[:, None] - logs[:, None]
        return HostLogprobs(chosen, top, scores)


def _largest(line: Floats, k: int) -> NDArray[np.int32]:
    """The places of the ``k`` largest numbers, the largest first, and of equal ones the first.

    They are not below the least of the ``k`` largest maxima of blocks. A block's numbers are
    equally far apart, so that NumPy compares whole vectors.
    """
    blocks = len(line) // _BLOCK
    places = np.arange(len(line))
    if k < blocks:
        maxima = line[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
        least = np.partition(maxima, blocks - k)[blocks - k]
        found = np.flatnonzero(line >= least)
        places = found if len(found) >= k else places  # there is NaN
    order = np.argsort(-line[places], kind="stable")[:k]
    return places[order].astype(np.int32)
