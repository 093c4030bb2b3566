"""``sampling.choice`` on a CPU: chooses each row's next token by compiled functions."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.compiled_sampling import Highest
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.sampling.drawing import Drawing
from chairlift.engine.sampling.host.draw import draw
from chairlift.engine.sampling.outcomes import NO_CHOICE, NONFINITE


def choose(
    lines: Floats,
    best: Highest,
    raw: Floats,
    drawing: Drawing | None,
    generated: Seq[int],
    masked: bool,
) -> NDArray[np.int32]:
    """As ``TokenChoice.__call__``, with logits in NumPy.

    Args:
        best: the highest logits of ``lines``, and their tokens.
        raw: the highest of the model's own logits, ``[rows]``; NaN if any of the row is.
        drawing: the rows that are not greedy; None: all are.
    """
    tokens = best.places
    if drawing is not None:
        rows = np.array(drawing.numbers)
        options, keys = drawing.host_options, drawing.keys(generated)
        tokens = tokens.copy()
        tokens[rows] = draw(lines, rows, best.values[rows], tokens[rows], options, keys)
    # The same conditions as in ``outcomes.row_outcomes``.
    possible = np.isfinite(best.values)
    any_finite = raw > -np.inf if masked else possible
    chosen = np.where(possible, tokens, NO_CHOICE)
    return np.where((raw < np.inf) & any_finite, chosen, NONFINITE).astype(np.int32)
