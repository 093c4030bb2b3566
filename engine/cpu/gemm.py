"""Many small matrix products in one call of the BLAS that MLX was given (see ``engine.cpu.blas``).

The library spreads a batch over its threads, which are awake anyway; NumPy and MLX do one product
after the other, most of them too small for two threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# CBLAS's names for how a matrix lies.
ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112


def products(a: Floats, b: Floats, scale: float = 1.0) -> Floats:
    """``scale * a @ b`` for every row and head, in memory of its own.

    Args:
        a: ``[rows, heads, m, k]``.
        b: ``[rows, heads, k, n]``; a view is read where it lies if one of its last two axes has no
            gaps and its heads, over all rows, lie at even distances.
    """
    batched = _batched()
    if batched is None:
        product: Floats = np.matmul(a * np.float32(scale), b)
        return product
    a = np.ascontiguousarray(a)
    b = b if _lies_well(b) else np.ascontiguousarray(b)
    rows, heads, m, k = a.shape
    n = b.shape[3]
    transposed = b.strides[3] != b.itemsize
    leading = b.strides[3 if transposed else 2] // b.itemsize
    # An axis of one has a stride that means nothing, and that BLAS may refuse.
    leading = max(leading, k if transposed else n)
    # From one head to the next over all rows.
    distance = b.strides[1] if heads > 1 else b.strides[0]
    result = np.empty((rows, heads, m, n), np.float32)
    batched(
        *(ROW_MAJOR, AS_IT_IS, TRANSPOSED if transposed else AS_IT_IS),
        *(m, n, k, scale),
        *(a.ctypes.data, k, m * k),
        *(b.ctypes.data, leading, distance // b.itemsize),
        *(0.0, result.ctypes.data, n, m * n),
        rows * heads,
    )
    return result


def _lies_well(b: Floats) -> bool:
    rows, heads, *_ = b.shape
    row, head, *matrix = b.strides
    even = rows == 1 or heads == 1 or row == head * heads
    return even and b.itemsize in matrix


@functools.cache
def _batched() -> Callable[..., None] | None:
    """MKL and OpenBLAS have it, with 32-bit sizes; Apple's Accelerate has not."""
    function = getattr(ctypes.CDLL(None), "cblas_sgemm_batch_strided", None)
    if function is None:
        return None
    size, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    matrix = [address, size, size]
    function.argtypes = [*[size] * 6, number, *matrix, *matrix, number, *matrix, size]
    function.restype = None
    batched: Callable[..., None] = function
    return batched
