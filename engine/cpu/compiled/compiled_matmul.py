"""Products by the functions of ``llvm.kernel``: of weights, and of attention's decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.jobs import MIN_SHARED_WEIGHTS, Run, run_shared
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import Memory, Scratch, view, weight_memory

# Queries of a key head, up to which reading keys and values takes longer than multiplying.
MAX_QUERIES = 16

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
        self._set_shape([len(weight) for weight in weights], stacked.shape[1], kernel.outputs)
        bits = stacked.view(np.uint32)
        narrow = not np.any(bits & np.uint32(0xFFFF))
        self._multiply = kernel.bfloat16 if narrow else kernel.float32
        numbers = (bits >> 16).astype(np.uint16) if narrow else stacked
        self._packed = in_panels(numbers, self._panels, kernel.outputs)
        # The function's further arguments.
        self._more: tuple[int, ...] = ()

    def _set_shape(self, outputs: Sequence[int], inputs: int, width: int) -> None:
        """Sets the outputs of each layer, the inputs, and the outputs of a panel."""
        self.stops, self._inputs = list(accumulate(outputs, initial=0)), inputs
        self._panels = -(-self.stops[-1] // width)
        self._stride = self._panels * width
        self._is_shared = self.stops[-1] * inputs >= MIN_SHARED_WEIGHTS

    def __call__(self, x: Floats) -> Floats:
        """See ``Matrix``."""
        return self.multiply(np.ascontiguousarray(x), _products, _products, run_shared)

    def multiply(self, x: Floats, result: Memory, work: Memory, run: Run) -> Floats:
        """See ``Matrix``."""
        product: Floats = result.array(np.float32, len(x), self._stride)
        if len(x):
            run(
                self._multiply,
                *(self._packed.ctypes.data, x.ctypes.data, product.ctypes.data),
                *(len(x), self._inputs, self._stride, *self._more),
                parts=self._panels,
                is_shared=self._is_shared,
            )
        return product[:, : self.stops[-1]]


def attention_products(a: Floats, b: Floats, scale: float = 1.0) -> Floats | None:
    """As ``gemm.products``; None if there is no kernel, or it does not support these shapes."""
    kernel = llvm_kernel.compiled()
    rows, heads, m, k = a.shape
    n = b.shape[3]
    if kernel is None or m > MAX_QUERIES or not b.size or not m or b.dtype != np.float32:
        return None
    if b.strides[2] == b.itemsize and k % kernel.lanes == 0:
        function, step = kernel.transposed, b.strides[3]
    elif b.strides[3] == b.itemsize and n % kernel.outputs == 0:
        function, step = kernel.plain, b.strides[2]
    else:
        return None
    a = np.ascontiguousarray(a if scale == 1 else a * np.float32(scale))
    result = np.empty((rows, heads, m, n), np.float32)
    run_shared(
        function,
        *(a.ctypes.data, b.ctypes.data, result.ctypes.data, m, k, n, heads),
        *(stride // b.itemsize for stride in (b.strides[0], b.strides[1], step)),
        parts=rows * heads,
        is_shared=b.size >= MIN_SHARED_WEIGHTS,
    )
    return result


def in_panels(numbers: NDArray[Any], panels: int, width: int) -> NDArray[Any]:
    """``[outputs, inputs]`` → ``[panels, inputs, width]``, at an address that is a multiple of 64.

    The last panel's outputs beyond the last one have zeros.
    """
    outputs, inputs = numbers.shape
    size = panels * inputs * width * numbers.itemsize
    packed = weight_memory(size).view(numbers.dtype).reshape(panels, inputs, width)
    whole = outputs // width
    packed[:whole] = numbers[: whole * width].reshape(whole, width, inputs).swapaxes(1, 2)
    if whole < panels:
        packed[whole] = 0
        packed[whole, :, : outputs - whole * width] = numbers[whole * width :].T
    return packed


_products = Scratch()
