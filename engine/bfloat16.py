"""Products with weights of bfloat16 on a CPU that has matrix units for them (Intel's AMX).

All else stays float32: an input is split into three bfloat16 numbers, which together have all of
its 24 bits, and its three products are added. So a product is as exact as one of float32 numbers
with these weights, of which half as many bytes are read.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.gemm import AS_IT_IS, ROW_MAJOR, TRANSPOSED, Floats
from chairlift.engine.host import BLOCK, view

# Rows that MKL packs weights for: in the order in which the matrix units want them.
_ROWS = 64
# CBLAS's names for a packed matrix, and for the second of a product's two.
_PACKED, _SECOND = 151, 162
# Bfloat16 numbers that a float32 is the sum of, and those of its bits that the first has.
PIECES = 3
_UPPER = np.uint32(0xFFFF0000)


class _Routines(NamedTuple):
    """MKL's, under its names without ``cblas_gemm_bf16bf16f32_``."""

    pack: Callable[..., None]
    compute: Callable[..., None]
    pack_get_size: Callable[..., int]


def available() -> bool:
    """Whether this CPU has the units, and the loaded BLAS uses them."""
    return _has_units() and _routines() is not None


def _has_units() -> bool:
    try:
        return " amx_bf16 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def _routines() -> _Routines | None:
    library = ctypes.CDLL(None)
    name = "cblas_gemm_bf16bf16f32"
    functions = [getattr(library, f"{name}_{verb}", None) for verb in _Routines._fields]
    if None in functions:
        return None
    size, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    routines = _Routines(*functions)  # type: ignore[arg-type]
    compute: Any = routines.compute
    compute.argtypes = [*[size] * 6, number, *[address, size] * 2, number, address, size]
    pack: Any = routines.pack
    pack.argtypes = [*[size] * 6, address, size, address]
    get_size: Any = routines.pack_get_size
    get_size.argtypes, get_size.restype = [size] * 4, ctypes.c_size_t
    pack.restype = compute.restype = None
    return routines


class Matrix:
    """The weights of layers that read the same input, one below the other.

    A token's product is the same to the last bit whichever tokens are multiplied beside it.

    Args:
        weights: ``[outputs, inputs]`` each, of bfloat16 numbers; read at the first product.
    """

    def __init__(self, weights: Sequence[mx.array]) -> None:
        routines = _routines()
        assert routines is not None
        self._routines = routines
        self._weights = weights
        self.stops = list(accumulate((len(weight) for weight in weights), initial=0))

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``, in memory that the next product reuses."""
        tokens, inputs = x.shape
        outputs = self.stops[-1]
        pieces = split(x)
        each = _product.array(np.float32, PIECES, tokens, outputs)
        self._routines.compute(
            *(ROW_MAJOR, AS_IT_IS, _PACKED, PIECES * tokens, outputs, inputs, 1.0),
            *(pieces.ctypes.data, inputs, self._packed.ctypes.data, inputs),
            *(0.0, each.ctypes.data, outputs),
        )
        each[1] += each[2]
        each[0] += each[1]
        product: Floats = each[0]
        return product

    def apart(self, product: Floats) -> list[Floats]:
        """A product's columns, by layer: views."""
        return [product[:, start:stop] for start, stop in pairwise(self.stops)]

    @functools.cached_property
    def _packed(self) -> NDArray[np.uint8]:
        """In pages of the system's, since MKL asks for several times the memory that it touches."""
        outputs, inputs = self.stops[-1], self._weights[0].shape[1]
        size = self._routines.pack_get_size(_SECOND, _ROWS, outputs, inputs)
        packed = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        whole = mx.concatenate(list(self._weights)).astype(mx.bfloat16)
        numbers = view(whole.view(mx.uint16))
        self._routines.pack(
            *(ROW_MAJOR, _SECOND, TRANSPOSED, _ROWS, outputs, inputs),
            *(numbers.ctypes.data, inputs, packed.ctypes.data),
        )
        return packed


class _Scratch:
    """Memory that is used again and again: what is fresh has to be cleared by the system first."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def array(self, dtype: type[Any], *shape: int) -> NDArray[Any]:
        """Of this type and shape, with whatever is there."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        memory: NDArray[Any] = self._memory[:size].view(dtype).reshape(shape)
        return memory


_product, _split, _first_rest, _second_rest = (_Scratch() for _ in range(4))


def split(x: Floats) -> NDArray[np.uint16]:
    """``[3, tokens, inputs]``, bfloat16, whose sum is ``x``: each has the next eight of its bits.

    In memory that the next one reuses.
    """
    tokens, inputs = x.shape
    pieces = _split.array(np.uint16, PIECES, tokens, inputs)
    step = max(1, BLOCK // inputs)
    for start in range(0, tokens, step):
        high, middle, low = pieces[:, start : start + step]
        block = np.ascontiguousarray(x[start : start + step])
        high[:] = _upper(block)
        rest = _without_upper(block, _first_rest)
        middle[:] = _upper(rest)
        low[:] = _upper(_without_upper(rest, _second_rest))
    return pieces


def _without_upper(x: Floats, scratch: _Scratch) -> Floats:
    """What numbers have beside their upper halves."""
    rest = scratch.array(np.float32, *x.shape)
    np.bitwise_and(x.view(np.uint32), _UPPER, out=rest.view(np.uint32))
    with np.errstate(invalid="ignore"):  # infinity leaves no number
        left: Floats = np.subtract(x, rest, out=rest)
    return left


def _upper(x: Floats) -> NDArray[np.uint16]:
    """The upper halves of the numbers, little-endian as every machine with these units: a view."""
    return x.view(np.uint16)[..., 1::2]
