"""NumPy arrays on the CPU: views of MLX arrays, memory for weights, and reusable memory."""

from __future__ import annotations

import math
import mmap
import sys
import threading
from contextlib import suppress
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# Bytes of a huge page, of the memory that is requested at a time, and of arrays for which NumPy
# itself requests huge pages.
_HUGE_PAGE, _CHUNK, _NUMPY_REQUESTS = 2 << 20, 32 << 20, 4 << 20


def view(array: mx.array) -> NDArray[Any]:
    """A NumPy view of the array's memory. Evaluates the array."""
    mx.eval(array)
    return np.array(array, copy=False)


def aligned(size: int) -> NDArray[np.uint8]:
    """Uninitialized memory of ``size`` bytes, at an address that is a multiple of 64."""
    memory = np.empty(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class _WeightMemory:
    """Memory of many weights side by side, in huge pages where Linux gives them on request.

    Each step reads all weights, and a CPU has to look up the address of each of their pages of
    4 KiB. NumPy requests huge pages only for arrays of 4 MiB and more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = aligned(0)

    def array(self, size: int) -> NDArray[np.uint8]:
        """Uninitialized memory of ``size`` bytes, at an address that is a multiple of 64."""
        if sys.platform != "linux" or size >= _NUMPY_REQUESTS:
            return aligned(size)
        taken = -(-size // 64) * 64
        with self._lock:
            if taken > self._rest.size:
                self._rest = _huge_pages(_CHUNK)
            memory, self._rest = self._rest[:size], self._rest[taken:]
        return memory


def _huge_pages(size: int) -> NDArray[np.uint8]:
    """Memory of ``size`` bytes that begins with a huge page, and is freed with its last view."""
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # this kernel has none
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE
    return memory[start : start + size]


weight_memory = _WeightMemory().array


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
