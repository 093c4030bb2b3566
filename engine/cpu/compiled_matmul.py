"""Products of few tokens by the kernel of ``llvm_kernel``, on CPUs without matrix units."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu import llvm_kernel, worker_threads
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.llvm_kernel import COUNTER_BYTES
from chairlift.engine.cpu.scratch import Scratch
from chairlift.engine.cpu.views import view

# Products with fewer weights end before another thread has begun.
MIN_SHARED_WEIGHTS = 1 << 17
# Parts that each thread takes of a product: a thread that lost its core delays one of them.
_PARTS = 8

available = llvm_kernel.available


class CompiledMatrix:
    """See ``engine.cpu.matrix.Matrix``.

    A token's product is identical to the last bit whichever tokens are multiplied beside it.

    Args:
        weights: ``[outputs, inputs]`` each, in float32. The copy is in bfloat16 if that has the
            same numbers.
    """

    def __init__(self, weights: Sequence[mx.array]) -> None:
        kernel = llvm_kernel.compiled()
        assert kernel is not None
        stacked: Floats = np.concatenate([view(weight) for weight in weights])
        self.stops = list(accumulate((len(weight) for weight in weights), initial=0))
        outputs, self._inputs = stacked.shape
        self._panels = -(-outputs // kernel.outputs)
        self._stride = self._panels * kernel.outputs
        bits = stacked.view(np.uint32)
        narrow = not np.any(bits & np.uint32(0xFFFF))
        self._multiply = kernel.bfloat16 if narrow else kernel.float32
        numbers = (bits >> 16).astype(np.uint16) if narrow else stacked
        self._packed = _packed(numbers, self._panels, kernel.outputs)
        self._is_shared = stacked.size >= MIN_SHARED_WEIGHTS

    def __call__(self, x: Floats) -> Floats:
        """See ``Matrix``."""
        x = np.ascontiguousarray(x)
        result: Floats = _products.array(np.float32, len(x), self._stride)
        if not len(x):
            return result[:, : self.stops[-1]]
        threads = worker_threads.shared.get() if self._is_shared else 1
        share = max(1, self._panels // (threads * _PARTS)) if threads > 1 else self._panels
        # NOTE: a thread may begin after the product's end. Its call still reads the counters.
        counters = ctypes.create_string_buffer(2 * COUNTER_BYTES)
        multiply = partial(
            self._multiply,
            *(self._packed.ctypes.data, x.ctypes.data, result.ctypes.data),
            *(len(x), self._inputs, self._stride, self._panels, share, counters),
        )
        if threads > 1:
            worker_threads.shared.run(multiply)
        else:
            multiply()
        return result[:, : self.stops[-1]]


def _packed(numbers: NDArray[Any], panels: int, width: int) -> NDArray[Any]:
    """``[outputs, inputs]`` → ``[panels, inputs, width]``, at an address that is a multiple of 64.

    The last panel's outputs beyond the last one have zeros.
    """
    outputs, inputs = numbers.shape
    size = panels * inputs * width * numbers.itemsize
    memory = np.zeros(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    packed = memory[start : start + size].view(numbers.dtype).reshape(panels, inputs, width)
    whole = outputs // width
    packed[:whole] = numbers[: whole * width].reshape(whole, width, inputs).swapaxes(1, 2)
    if whole < panels:
        packed[whole, :, : outputs - whole * width] = numbers[whole * width :].T
    return packed


_products = Scratch()
