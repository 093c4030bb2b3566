"""Tokens of each row's recurrent state, by ``llvm.recurrence.kernel``; states change in place.

A function is to be called only with arrays for which ``supports`` holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chairlift.engine.cpu.compiled.jobs import MIN_SHARED, Run, run_shared
from chairlift.engine.cpu.compiled.llvm.recurrence import kernel as llvm_recurrence
from chairlift.engine.cpu.gemm import Floats


def available() -> bool:
    """Whether there is a kernel for this CPU."""
    return llvm_recurrence.compiled() is not None


def supports(numbers: int) -> bool:
    """Whether there is a kernel, and it reads states with lines of so many numbers."""
    kernel = llvm_recurrence.compiled()
    return kernel is not None and numbers > 0 and numbers % kernel.lanes == 0


def decay(
    state: Floats, k: Floats, q: Floats, v: Floats, g: Floats, beta: Floats | None = None
) -> Floats:
    """``S = S * g + v k^T`` for each token, and its output is ``S q``.

    Args:
        state: ``[rows, heads, lines, numbers]``, contiguous.
        k, q: ``[rows, tokens, groups, numbers]``; a group's heads are one after the other.
        v: ``[rows, tokens, heads, lines]``.
        g: decays, ``[rows, tokens, heads]`` or ``[rows, tokens, heads, numbers]``.
        beta: ``[rows, tokens, heads]``: ``beta * (v - (S * g) k)`` is added in place of ``v``.

    Returns:
        As ``v``.
    """
    result = np.empty(v.shape, np.float32)
    if not result.size:
        return result
    # NOTE: the names keep the copies until the job is done.
    k, q, v, g = (np.ascontiguousarray(x, np.float32) for x in (k, q, v, g))
    beta = None if beta is None else np.ascontiguousarray(beta, np.float32)
    add_decay(state.shape, state.ctypes.data, k, q, v, g, beta, result, run_shared)
    return result


def add_decay(
    shape: Sequence[int],
    state: int,
    k: Floats,
    q: Floats,
    v: Floats,
    g: Floats,
    beta: Floats | None,
    result: Floats,
    run: Run,
) -> object:
    """As ``decay``, by a job; returns what ``run`` does.

    Args:
        shape: the state's.
        state: its address.
        k, q, v, g, beta, result: contiguous.
    """
    kernel = llvm_recurrence.compiled()
    assert kernel is not None
    rows, heads, lines, numbers = shape
    tokens, rates = v.shape[1], g if beta is None else beta
    name = "decayed" if beta is None else "delta"
    function, blocks = kernel.fastest(name, tokens, lines, numbers)
    return run(
        function,
        *(state, *(x.ctypes.data for x in (k, q, v, g, rates, result))),
        *(tokens, heads, heads // k.shape[2], lines, numbers, 1 if g.ndim == 3 else numbers),
        parts=rows * heads * blocks,
        is_shared=rows * tokens * heads * lines * numbers >= MIN_SHARED,
    )
