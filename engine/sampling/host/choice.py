"""Chooses the next token of each row from its logits after bias, penalties and mask."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.compiled_sampling import highest
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.sampling.drawing import Drawing
from chairlift.engine.sampling.host.draw import draw
from chairlift.engine.sampling.outcomes import NO_CHOICE, NONFINITE


def choose(
    lines: Floats, raw: Floats, drawing: Drawing | None, generated: Seq[int], masked: bool
) -> NDArray[np.int32]:
    """As ``TokenChoice.__call__``, with logits in NumPy.

    Args:
        drawing: the rows that are not greedy, if there are any.
    """
    every = np.arange(len(lines))
    tokens, best = highest(lines, every)
    own = best if lines is raw else highest(raw, every)[1]
    if drawing is not None:
        rows = np.array(drawing.numbers)
        given = best[rows], tokens[rows], drawing.host_options, drawing.keys(generated)
        tokens[rows] = draw(lines, rows, *given)
    possible = np.isfinite(best)
    left = own > -np.inf if masked else possible
    return np.where((own < np.inf) & left, np.where(possible, tokens, NO_CHOICE), NONFINITE).astype(
        np.int32
    )
