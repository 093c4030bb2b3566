"""Products with weights of bfloat16 on a CPU that has matrix units for them (Intel's AMX).

Numbers stay float32 everywhere else: an input is split into two bfloat16 numbers, the rounded one
and what is left of it, which together have 16 of float32's 24 bits, and its two products are added
in float32. (TF32, in which MLX multiplies on NVIDIA's GPUs, has 11.)
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
from chairlift.engine.host import BLOCK

# Tokens up to which a product takes the time of reading its weights, which it does twice as fast if
# they are packed: in the order in which the matrix units want them.
FEW = 64
# CBLAS's names for a packed matrix, and for the second of a product's two.
_PACKED, _SECOND = 151, 162
# A float32's bits that a bfloat16 has, and half of the last of them.
_UPPER, _HALF = np.uint32(0xFFFF0000), np.uint32(0x8000)


class _Routines(NamedTuple):
    """MKL's, under its names without ``cblas_gemm_bf16bf16f32``."""

    product: Callable[..., None]
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
    names = (name, f"{name}_pack", f"{name}_compute", f"{name}_pack_get_size")
    functions = [getattr(library, name, None) for name in names]
    if None in functions:
        return None
    size, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    routines = _Routines(*functions)  # type: ignore[arg-type]
    product: Any = routines.product
    product.argtypes = [*[size] * 6, number, *[address, size] * 2, number, address, size]
    compute: Any = routines.compute
    compute.argtypes = product.argtypes
    pack: Any = routines.pack
    pack.argtypes = [*[size] * 6, address, size, address]
    get_size: Any = routines.pack_get_size
    get_size.argtypes, get_size.restype = [size] * 4, ctypes.c_size_t
    product.restype = compute.restype = pack.restype = None
    return routines


class Matrix:
    """The weights of layers that read the same input, one below the other.

    Args:
        weights: ``[outputs, inputs]`` each, bfloat16, evaluated; they are kept.
    """

    def __init__(self, weights: Sequence[mx.array]) -> None:
        routines = _routines()
        assert routines is not None
        self._routines = routines
        self._weights = [np.array(weight.view(mx.uint16), copy=False) for weight in weights]
        self.stops = list(accumulate((len(weight) for weight in self._weights), initial=0))
        self._inputs = self._weights[0].shape[1]

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``, in memory that the next product reuses."""
        tokens, inputs = x.shape
        outputs = self.stops[-1]
        pieces = split(x)
        if tokens <= FEW:
            both = _product.floats(2 * tokens, outputs)
            self._routines.compute(
                *(ROW_MAJOR, AS_IT_IS, _PACKED, 2 * tokens, outputs, inputs, 1.0),
                *(pieces.ctypes.data, inputs, self._packed.ctypes.data, inputs),
                *(0.0, both.ctypes.data, outputs),
            )
            both[:tokens] += both[tokens:]
            return both[:tokens]
        result = _product.floats(tokens, outputs)
        for weight, start in zip(self._weights, self.stops, strict=False):
            for piece, kept in zip(pieces, (0.0, 1.0), strict=True):
                self._routines.product(
                    *(ROW_MAJOR, AS_IT_IS, TRANSPOSED, tokens, len(weight), inputs, 1.0),
                    *(piece.ctypes.data, inputs, weight.ctypes.data, inputs),
                    *(kept, result[:, start:].ctypes.data, outputs),
                )
        return result

    def apart(self, product: Floats) -> list[Floats]:
        """A product's columns, by layer: views."""
        return [product[:, start:stop] for start, stop in pairwise(self.stops)]

    @functools.cached_property
    def _packed(self) -> NDArray[np.uint8]:
        """In pages of the system's, since MKL asks for several times the memory that it touches."""
        outputs, inputs = self.stops[-1], self._inputs
        size = self._routines.pack_get_size(_SECOND, FEW, outputs, inputs)
        packed = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        weights = self._weights
        whole = weights[0] if len(weights) == 1 else np.concatenate(weights)
        self._routines.pack(
            *(ROW_MAJOR, _SECOND, TRANSPOSED, FEW, outputs, inputs),
            *(whole.ctypes.data, inputs, packed.ctypes.data),
        )
        return packed


class _Scratch:
    """Memory that is used again and again: what is fresh has to be cleared by the system first."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def floats(self, *shape: int) -> Floats:
        """Of this shape, with whatever is there."""
        size = 4 * math.prod(shape)
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(np.float32).reshape(shape)


_product, _pieces, _rest = _Scratch(), _Scratch(), _Scratch()


def split(x: Floats) -> NDArray[np.uint16]:
    """``[2, tokens, inputs]``, bfloat16: ``x`` cut off, and what that leaves of it, rounded.

    In memory that the next one reuses.
    """
    tokens, inputs = x.shape
    pieces = _pieces.floats(tokens, inputs).view(np.uint16).reshape(2, tokens, inputs)
    step = max(1, BLOCK // inputs)
    for start in range(0, tokens, step):
        block = np.ascontiguousarray(x[start : start + step])
        high, low = pieces[:, start : start + step]
        rest = _rest.floats(*block.shape)
        bits = rest.view(np.uint32)
        np.bitwise_and(block.view(np.uint32), _UPPER, out=bits)
        high[:] = _upper(rest)
        with np.errstate(invalid="ignore"):  # infinity leaves no number
            np.subtract(block, rest, out=rest)
        bits += _HALF
        low[:] = _upper(rest)
    return pieces


def _upper(x: Floats) -> NDArray[np.uint16]:
    """The upper halves of the numbers, little-endian as every machine with these units: a view."""
    return x.view(np.uint16)[..., 1::2]
