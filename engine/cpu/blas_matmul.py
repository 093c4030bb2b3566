"""Products of few tokens with float32 weights, by the BLAS that ``engine.cpu.blas`` loaded.

The weights are MLX's own: nothing is copied.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.cpu.compiled.jobs import Run
from chairlift.engine.cpu.gemm import AS_IT_IS, ROW_MAJOR, TRANSPOSED, Floats
from chairlift.engine.cpu.views import Memory, Scratch, view

# OpenBLAS's product of two matrices copies the weights first. Up to this many tokens, one
# matrix-vector product for each is faster (measured on an AMD EPYC: 0.22 ms against 0.59 for one
# token and 3072 x 576 weights).
MAX_VECTORS = 2


class _Routines(NamedTuple):
    sgemm: Callable[..., None]
    sgemv: Callable[..., None]


def available() -> bool:
    """Whether a fast BLAS is loaded."""
    return load_fast_blas().path is not None and _routines() is not None


@functools.cache
def _routines() -> _Routines | None:
    library = ctypes.CDLL(None)
    functions = [getattr(library, f"cblas_{name}", None) for name in _Routines._fields]
    if None in functions:
        return None
    size, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    sgemm, sgemv = functions
    assert sgemm is not None
    assert sgemv is not None
    sgemm.argtypes = [*[size] * 6, number, *[address, size] * 2, number, address, size]
    sgemv.argtypes = [*[size] * 4, number, *[address, size] * 2, number, address, size]
    sgemm.restype = sgemv.restype = None
    return _Routines(sgemm, sgemv)


class BlasMatrix:
    """See ``engine.cpu.matrix.Matrix``.

    Args:
        weights: ``[outputs, inputs]`` each. If there are several, they have to be adjacent views of
            one array; see ``stacked``.
    """

    def __init__(self, weights: Sequence[mx.array]) -> None:
        routines = _routines()
        assert routines is not None
        self._routines = routines
        self._weights = [np.ascontiguousarray(view(weight)) for weight in weights]
        self.stops = list(accumulate((len(weight) for weight in weights), initial=0))
        addresses = [weight.ctypes.data for weight in self._weights]
        width = 4 * weights[0].shape[1]
        self._is_stacked = addresses == [addresses[0] + stop * width for stop in self.stops[:-1]]

    def __call__(self, x: Floats) -> Floats:
        """See ``Matrix``."""
        x = np.ascontiguousarray(x)
        result: Floats = _products.array(np.float32, len(x), self.stops[-1])
        if self._is_stacked:
            self._multiply(x, self._weights[0].ctypes.data, self.stops[-1], result, 0)
        else:
            for weight, start in zip(self._weights, self.stops, strict=False):
                self._multiply(x, weight.ctypes.data, len(weight), result, start)
        return result

    def multiply(self, x: Floats, result: Memory, work: Memory, run: Run) -> None:
        """See ``Matrix``; the BLAS computes no jobs."""

    def _multiply(self, x: Floats, weights: int, outputs: int, result: Floats, start: int) -> None:
        (tokens, inputs), stride = x.shape, result.shape[1]
        source, target = x.ctypes.data, result.ctypes.data + 4 * start
        if tokens <= MAX_VECTORS:
            for token in range(tokens):
                self._routines.sgemv(
                    *(ROW_MAJOR, AS_IT_IS, outputs, inputs, 1.0, weights, inputs),
                    *(source + 4 * token * inputs, 1, 0.0, target + 4 * token * stride, 1),
                )
            return
        self._routines.sgemm(
            *(ROW_MAJOR, AS_IT_IS, TRANSPOSED, tokens, outputs, inputs, 1.0),
            *(source, inputs, weights, inputs, 0.0, target, stride),
        )


_products = Scratch()
