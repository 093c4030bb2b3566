"""NumPy arrays on the CPU: views of MLX arrays, and reusable memory."""

from __future__ import annotations

import math
import threading
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def view(array: mx.array) -> NDArray[Any]:
    """A NumPy view of the array's memory. Evaluates the array."""
    mx.eval(array)
    return np.array(array, copy=False)


def aligned(size: int) -> NDArray[np.uint8]:
    """Uninitialized memory of ``size`` bytes, at an address that is a multiple of 64."""
    memory = np.empty(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class Memory(Protocol):
    """Memory that each use overwrites."""

    def array(self, dtype: type[Any], *shape: int) -> NDArray[Any]:
        """An uninitialized array of this type and shape; its address is a multiple of 64."""
        ...


class Scratch(threading.local):
    """See ``Memory``; each thread has its own.

    Fresh memory is slower, because the system clears it.
    """

    def __init__(self) -> None:
        self._memory = aligned(0)

    def array(self, dtype: type[Any], *shape: int) -> NDArray[Any]:
        """See ``Memory``."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if size > self._memory.size:
            self._memory = aligned(size)
        memory: NDArray[Any] = self._memory[:size].view(dtype).reshape(shape)
        return memory


class LastingMemory:
    """See ``Memory``. An array's memory stays: later ones of about the same size have the same."""

    def __init__(self) -> None:
        self._memory: dict[int, NDArray[np.uint8]] = {}

    def array(self, dtype: type[Any], *shape: int) -> NDArray[Any]:
        """See ``Memory``."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        capacity = 1 << max(0, size - 1).bit_length()
        if capacity not in self._memory:
            self._memory[capacity] = aligned(capacity)
        memory: NDArray[Any] = self._memory[capacity][:size].view(dtype).reshape(shape)
        return memory
