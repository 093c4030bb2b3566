"""NumPy arrays on the CPU: views of MLX arrays, reusable memory, and elementwise functions."""

from __future__ import annotations

import math
import threading
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


def aligned(size: int) -> NDArray[np.uint8]:
    """Uninitialized memory of ``size`` bytes, at an address that is a multiple of 64."""
    memory = np.empty(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


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


def geglu(gates: Floats, others: Floats) -> Floats:
    """``gelu_approx(gates) * others``, for ``[tokens, numbers]``."""
    result = np.empty(gates.shape, np.float32)
    tokens = max(1, BLOCK // gates.shape[1])
    for start in range(0, len(gates), tokens):
        block = slice(start, start + tokens)
        gate, part = gates[block], result[block]
        with np.errstate(over="ignore"):  # the tangent of infinity is 1
            np.multiply(gate, gate, out=part)
            part *= np.float32(0.044715)
            part += 1
            part *= gate
            part *= np.float32(math.sqrt(2 / math.pi))
            np.tanh(part, out=part)
        part += 1
        part *= gate
        part *= others[block]
        part *= np.float32(0.5)
    return result


class Norm:
    """The root mean square norm of a layer, of few tokens.

    Args:
        layer: has an ``eps``. Its weights are measured, because some files add 1 to them.
        dims: the numbers of a token.
    """

    def __init__(self, layer: Any, dims: int) -> None:
        ones = view(layer(mx.ones((1, dims)))).reshape(dims)
        self._eps = np.float32(layer.eps)
        self._weight: Floats = ones * np.sqrt(1 + self._eps)

    def __call__(self, x: Floats) -> Floats:
        """``[..., dims]``, in new memory."""
        scale = np.einsum("...i,...i->...", x, x)[..., None]
        scale /= np.float32(x.shape[-1])
        scale += self._eps
        np.sqrt(scale, out=scale)
        result: Floats = x / scale
        result *= self._weight
        return result


class Scratch(threading.local):
    """Memory that each use overwrites; each thread has its own.

    Fresh memory is slower, because the system clears it.
    """

    def __init__(self) -> None:
        self._memory = aligned(0)

    def array(self, dtype: type[Any], *shape: int) -> NDArray[Any]:
        """An uninitialized array of this type and shape; its address is a multiple of 64."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if size > self._memory.size:
            self._memory = aligned(size)
        memory: NDArray[Any] = self._memory[:size].view(dtype).reshape(shape)
        return memory
