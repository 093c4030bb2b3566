"""Matrix products with bfloat16 weights on CPUs with matrix units for them (Intel AMX).

Inputs and outputs are float32. Each input number is split into three bfloat16 numbers, which
together have its 24 bits, and the three products are added. The result is as exact as a float32
product with these weights, and the product reads half as many bytes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.gemm import AS_IT_IS, ROW_MAJOR, TRANSPOSED, Floats
from chairlift.engine.cpu.views import Scratch, view

# The number of input rows for which MKL packs weights, in the order of the matrix units.
_ROWS = 64
# CBLAS's codes for a packed matrix, and for the second factor of a product.
_PACKED, _SECOND = 151, 162
# A float32 number is the sum of this many bfloat16 numbers; the first has its upper bits.
PIECES = 3
_UPPER = np.uint32(0xFFFF0000)


class _Routines(NamedTuple):
    """MKL's routines, named without the prefix ``cblas_gemm_bf16bf16f32_``."""

    pack: Callable[..., None]
    compute: Callable[..., None]
    pack_get_size: Callable[..., int]


def available() -> bool:
    """Whether this CPU has the matrix units, and the loaded BLAS uses them."""
    return has_units() and _routines() is not None


def has_units() -> bool:
    """Whether this CPU has the matrix units; the BLAS may still not use them."""
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


class AmxMatrix:
    """See ``engine.cpu.matrix.Matrix``.

    A token's product is identical to the last bit whichever tokens are multiplied beside it.

    Args:
        weights: ``[outputs, inputs]`` each, of bfloat16 numbers; packed at the first product.
    """

    def __init__(self, weights: Sequence[mx.array]) -> None:
        routines = _routines()
        assert routines is not None
        self._routines = routines
        self._weights = weights
        self.stops = list(accumulate((len(weight) for weight in weights), initial=0))
        self._workspaces: dict[int, _Workspace] = {}

    def __call__(self, x: Floats) -> Floats:
        """See ``Matrix``."""
        tokens, inputs = x.shape
        outputs = self.stops[-1]
        workspace = self._workspaces.get(tokens)
        if workspace is None:
            workspace = self._workspaces[tokens] = _Workspace(tokens, inputs, outputs)
        workspace.split(x)
        self._routines.compute(
            *(ROW_MAJOR, AS_IT_IS, _PACKED, PIECES * tokens, outputs, inputs, 1.0),
            *(workspace.pieces_address, inputs, self._packed, inputs),
            *(0.0, workspace.products_address, outputs),
        )
        product: Floats = workspace.products[0]
        second, third = workspace.products[1:]
        second += third
        product += second
        return product

    @functools.cached_property
    def _packed(self) -> int:
        """The address of the packed weights.

        They are in mapped pages, because MKL asks for several times the memory that it touches.
        """
        outputs, inputs = self.stops[-1], self._weights[0].shape[1]
        size = self._routines.pack_get_size(_SECOND, _ROWS, outputs, inputs)
        self._memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        stacked = mx.concatenate(list(self._weights)).astype(mx.bfloat16)
        numbers = view(stacked.view(mx.uint16))
        address: int = self._memory.ctypes.data
        self._routines.pack(
            *(ROW_MAJOR, _SECOND, TRANSPOSED, _ROWS, outputs, inputs),
            *(numbers.ctypes.data, inputs, address),
        )
        return address


class _Workspace:
    """Buffers for splitting and multiplying a number of tokens; all share the same memory."""

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
        """Writes three ``pieces`` whose sum is ``x``; each holds the next eight bits of it."""
        x = np.ascontiguousarray(x)
        first, second = self._first, self._second
        self.pieces[0] = _upper(x)
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            np.bitwise_and(x.view(np.uint32), _UPPER, out=self._bits[0])
            np.subtract(x, first, out=first)
            self.pieces[1] = self._uppers[0]
            np.bitwise_and(self._bits[0], _UPPER, out=self._bits[1])
            np.subtract(first, second, out=second)
            self.pieces[2] = self._uppers[1]


_pieces, _products, _first, _second = (Scratch() for _ in range(4))


def _upper(x: Floats) -> NDArray[np.uint16]:
    """A view of the numbers' upper halves. (All CPUs with these units are little-endian.)"""
    return x.view(np.uint16)[..., 1::2]
