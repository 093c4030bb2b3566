"""One token of each row's recurrent state, by ``llvm.recurrence``; states change in place.

A function is to be called only with arrays for which ``supports`` holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chairlift.engine.cpu.compiled.jobs import MIN_SHARED, Run, run_shared
from chairlift.engine.cpu.compiled.llvm import recurrence
from chairlift.engine.cpu.gemm import Floats


def available() -> bool:
    """Whether there is a kernel for this CPU."""
    return recurrence.compiled() is not None


def supports(numbers: int) -> bool:
    """Whether there is a kernel, and it reads states with lines of so many numbers."""
    kernel = recurrence.compiled()
    return kernel is not None and numbers > 0 and numbers % kernel.lanes == 0


def decay(
    state: Floats, k: Floats, q: Floats, v: Floats, g: Floats, beta: Floats | None = None
) -> Floats:
    """``S = S * g + v k^T``, and the output is ``S q``.

    Args:
        state: ``[rows, heads, lines, numbers]``, contiguous.
        k, q: ``[rows, groups, numbers]``; a group's heads are one after the other.
        v: ``[rows, heads, lines]``.
        g: decays, ``[rows, heads]`` or ``[rows, heads, numbers]``.
        beta: ``[rows, heads]``: what is added is ``beta * (v - (S * g) k)`` in place of ``v``.

    Returns:
        As ``v``.
    """
    result = np.empty(v.shape, np.float32)
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
    kernel = recurrence.compiled()
    assert kernel is not None
    rows, heads, lines, numbers = shape
    rates = g if beta is None else beta
    return run(
        kernel.decayed if beta is None else kernel.delta,
        *(state, *(x.ctypes.data for x in (k, q, v, g, rates, result))),
        *(heads, heads // k.shape[1], lines, numbers, 1 if g.ndim == 2 else numbers),
        parts=rows * heads,
        is_shared=rows * heads * lines * numbers >= MIN_SHARED,
    )


def select(state: Floats, k: Floats, q: Floats, v: Floats, dt: Floats, a: Floats) -> Floats:
    """``S = S * exp(dt * a) + (dt * v) k^T``, and the output is ``S q``.

    Args:
        state: ``[rows, lines, numbers]``, contiguous.
        k, q: ``[rows, numbers]``.
        v, dt: ``[rows, lines]``.
        a: ``[lines, numbers]``; its products with ``dt`` are at most 0.

    Returns:
        As ``v``.
    """
    kernel = recurrence.compiled()
    assert kernel is not None
    rows, lines, numbers = state.shape
    result = np.empty((rows, lines), np.float32)
    k, q, v, dt, a = (np.ascontiguousarray(x, np.float32) for x in (k, q, v, dt, a))
    run_shared(
        kernel.selective,
        *(x.ctypes.data for x in (state, k, q, v, dt, a, result)),
        *(lines, numbers),
        parts=rows * lines,
        is_shared=state.size >= MIN_SHARED,
    )
    return result
