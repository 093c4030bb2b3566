"""Tokens of recurrent layers: the kernels that ``engine.model.layers`` calls.

They evaluate their inputs while the graph is built, so the model is eager; see ``cpu.kernels``. A
state that a cache has handed out changes in place (``cache.state.host_state``). MLX would write
every state into new memory, in several passes.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.state import host_state
from chairlift.engine.cpu.compiled import recurrence
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.model.layers.install import Kernels
from chairlift.engine.model.recorder import record


class Recurrence(NamedTuple):
    """A ``HostCall``: the outputs of tokens; the first input, the state, changes in place.

    The inputs are those of ``recurrence.decay``.
    """


def kernels() -> Kernels | None:
    """The kernels of this CPU."""
    return Kernels(gated_delta, decayed) if recurrence.available() else None


def decayed(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array
) -> tuple[mx.array, mx.array] | None:
    """See ``engine.model.layers.decayed.DecayedKernel``."""
    if not _takes(q, k, v, g, state):
        return None
    stand_in = record(Recurrence(), [state, k, q, v, g], v.shape)
    if stand_in is not None:
        return stand_in, state
    inputs = _evaluated(k, q, v, g)
    memory, after = _next_state(state)
    return mx.array(recurrence.decay(memory, *inputs)), after


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array] | None:
    """See ``engine.model.layers.gated_delta.GatedDeltaKernel``."""
    if beta.shape != v.shape[:3] or beta.dtype != mx.float32 or not _takes(q, k, v, g, state):
        return None
    if mask is not None:
        if mask.shape != v.shape[:2]:
            return None
        # Without decay and rate, a token changes nothing.
        g = mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1)
        beta = mx.where(mask[..., None], beta, 0)
    stand_in = record(Recurrence(), [state, k, q, v, g, beta], v.shape)
    if stand_in is not None:
        return stand_in, state
    inputs = _evaluated(k, q, v, g, beta)
    memory, after = _next_state(state)
    return mx.array(recurrence.decay(memory, *inputs)), after


def _takes(q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array) -> bool:
    """Whether these are float32 arrays with the shapes of ``recurrence``."""
    if v.ndim != 4 or not recurrence.supports(k.shape[-1]):
        return False
    rows, tokens, heads, lines = v.shape
    numbers = k.shape[-1]
    return (
        all(x.dtype == mx.float32 for x in (q, k, v, g, state))
        and q.shape == k.shape == (rows, tokens, k.shape[2], numbers)
        and heads % k.shape[2] == 0
        and g.shape in ((rows, tokens, heads), (rows, tokens, heads, numbers))
        and state.shape == (rows, heads, lines, numbers)
    )


def _evaluated(*arrays: mx.array) -> list[Floats]:
    mx.eval(arrays)
    return [np.array(array, copy=False) for array in arrays]


def _next_state(state: mx.array) -> tuple[Floats, mx.array]:
    """Memory with the numbers of a state, and the array that it belongs to."""
    memory = host_state(state)
    if memory is None or not memory.flags.c_contiguous:
        state = mx.array(np.ascontiguousarray(view(state)))
        memory = view(state)
    return memory, state
