"""Computes many small matrix products in one call of the BLAS that ``engine.cpu.blas`` loaded.

The BLAS spreads a batch of products over its threads. NumPy and MLX compute one product after the
other, and most of these are too small for two threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# CBLAS's codes for the layout of a matrix.
ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112


def products(a: Floats, b: Floats, scale: float = 1.0) -> Floats:
    """Computes ``scale * a @ b`` for every row and head, in new memory.

    Args:
        a: ``[rows, heads, m, k]``.
        b: ``[rows, heads, k, n]``. A view is not copied if one of its last two axes is contiguous
            and its heads, over all rows, are evenly spaced.
    """
    batched = _batched()
    if batched is None:
        product: Floats = np.matmul(a * np.float32(scale), b)
        return product
    a = np.ascontiguousarray(a)
    b = b if _is_readable(b) else np.ascontiguousarray(b)
    rows, heads, m, k = a.shape
    n = b.shape[3]
    transposed = b.strides[3] != b.itemsize
    leading = b.strides[3 if transposed else 2] // b.itemsize
    # An axis of one has a stride that means nothing, and that BLAS may refuse.
    leading = max(leading, k if transposed else n)
    # The distance from one head to the next is the same over all rows.
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


def _is_readable(b: Floats) -> bool:
    rows, heads, *_ = b.shape
    row, head, *matrix = b.strides
    even = rows == 1 or heads == 1 or row == head * heads
    return even and b.itemsize in matrix


@functools.cache
def _batched() -> Callable[..., None] | None:
    """The batched routine of MKL and OpenBLAS (32-bit sizes); None with Apple's Accelerate."""
    function = getattr(ctypes.CDLL(None), "cblas_sgemm_batch_strided", None)
    if function is None:
        return None
    size, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    matrix = [address, size, size]
    function.argtypes = [*[size] * 6, number, *matrix, *matrix, number, *matrix, size]
    function.restype = None
    batched: Callable[..., None] = function
    return batched
