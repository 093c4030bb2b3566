"""Views MLX arrays as NumPy arrays without copying, on the CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.gemm import Floats

# Numbers that several passes process together, so that later passes find them in a core's L2.
BLOCK = 1 << 17


def view(array: mx.array) -> NDArray[Any]:
    """A NumPy view of the array's memory. Evaluates the array."""
    mx.eval(array)
    return np.array(array, copy=False)


def swiglu(gates: Floats, others: Floats) -> Floats:
    """``silu(gates) * others``, for ``[tokens, numbers]``."""
    result = np.empty(gates.shape, np.float32)
    tokens = max(1, BLOCK // gates.shape[1])
    for start in range(0, len(gates), tokens):
        block = slice(start, start + tokens)
        part = result[block]
        np.negative(gates[block], out=part)
        with np.errstate(over="ignore"):  # a gate of -1e3 gives 0, by way of infinity
            np.exp(part, out=part)
        part += 1
        np.divide(gates[block], part, out=part)
        part *= others[block]
    return result
