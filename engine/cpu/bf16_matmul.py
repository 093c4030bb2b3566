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

from chairlift.engine.cpu.gemm import AS_IT_IS, ROW_MAJOR, TRANSPOSED, Floats
from chairlift.engine.cpu.views import view

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
    return has_units() and _routines() is not None


def has_units() -> bool:
    """Whether this CPU has them, used or not."""
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
    """The weights of layers that read the same input, one below the other, for few tokens.

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
        self._rooms: dict[int, _Room] = {}

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``, in memory that the next product reuses."""
        tokens, inputs = x.shape
        outputs = self.stops[-1]
        room = self._rooms.get(tokens)
        if room is None:
            room = self._rooms[tokens] = _Room(tokens, inputs, outputs)
        room.split(x)
        self._routines.compute(
            *(ROW_MAJOR, AS_IT_IS, _PACKED, PIECES * tokens, outputs, inputs, 1.0),
            *(room.pieces_address, inputs, self._packed, inputs),
            *(0.0, room.products_address, outputs),
        )
        product: Floats = room.products[0]
        second, third = room.products[1:]
        second += third
        product += second
        return product

    def apart(self, product: Floats) -> list[Floats]:
        """A product's columns, by layer: views."""
        return [product[:, start:stop] for start, stop in pairwise(self.stops)]

    @functools.cached_property
    def _packed(self) -> int:
        """Where the packed weights lie.

        In pages of the system's, since MKL asks for several times the memory that it touches.
        """
        outputs, inputs = self.stops[-1], self._weights[0].shape[1]
        size = self._routines.pack_get_size(_SECOND, _ROWS, outputs, inputs)
        self._memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        whole = mx.concatenate(list(self._weights)).astype(mx.bfloat16)
        numbers = view(whole.view(mx.uint16))
        address: int = self._memory.ctypes.data
        self._routines.pack(
            *(ROW_MAJOR, _SECOND, TRANSPOSED, _ROWS, outputs, inputs),
            *(numbers.ctypes.data, inputs, address),
        )
        return address


class _Room:
    """Where so many tokens are split and multiplied; all rooms are the same memory."""

    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        self.pieces = _pieces.array(np.uint16, PIECES, tokens, inputs)
        self.products = _products.array(np.float32, PIECES, tokens, outputs)
        self.pieces_address: int = self.pieces.ctypes.data
        self.products_address: int = self.products.ctypes.data
        self._first = _first.array(np.float32, tokens, inputs)
        self._second = _second.array(np.float32, tokens, inputs)
        self._bits = self._first.view(np.uint32), self._second.view(np.uint32)
        self._uppers = _upper(self._first), _upper(self._second)

    def split(self, x: Floats) -> None:
        """Makes ``pieces`` the numbers whose sum is ``x``: each has its next eight bits."""
        x = np.ascontiguousarray(x)
        first, second = self._first, self._second
        self.pieces[0] = _upper(x)
        with np.errstate(invalid="ignore"):  # infinity leaves no number
            np.bitwise_and(x.view(np.uint32), _UPPER, out=self._bits[0])
            np.subtract(x, first, out=first)
            self.pieces[1] = self._uppers[0]
            np.bitwise_and(self._bits[0], _UPPER, out=self._bits[1])
            np.subtract(first, second, out=second)
            self.pieces[2] = self._uppers[1]


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


_pieces, _products, _first, _second = (_Scratch() for _ in range(4))


def _upper(x: Floats) -> NDArray[np.uint16]:
    """The upper halves of the numbers, little-endian as every machine with these units: a view."""
    return x.view(np.uint16)[..., 1::2]
