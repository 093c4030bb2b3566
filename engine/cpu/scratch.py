"""Reusable memory for the inputs and results of products."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Scratch(threading.local):
    """Memory that each use overwrites; each thread has its own.

    Fresh memory is slower, because the system clears it.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def array(self, dtype: type[Any], *shape: int) -> NDArray[Any]:
        """An uninitialized array of this type and shape."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        memory: NDArray[Any] = self._memory[:size].view(dtype).reshape(shape)
        return memory
