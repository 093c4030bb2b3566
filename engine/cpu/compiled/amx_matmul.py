"""Products of float32 inputs with bfloat16 weights by the functions of ``llvm.amx``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.jobs import (
    MIN_SHARED,
    MIN_SHARED_WEIGHTS,
    Run,
    run_shared,
)
from chairlift.engine.cpu.compiled.llvm.amx import (
    INPUTS,
    OUTPUTS,
    PIECES,
    ROWS,
    TILE_BYTES,
    compiled,
)
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import Memory, Scratch, view, weight_memory

# Steps of inputs that are multiplied at a time, and bytes of the pieces of the tokens that are: all
# panels read these pieces, so they have to stay in a core's L2 cache.
_STEPS = 48
_PIECES_BYTES = 1 << 20


def available() -> bool:
    """Whether ``llvmlite`` is installed, and this process may use the CPU's matrix units."""
    return compiled() is not None


def has_units() -> bool:
    """Whether this CPU has the matrix units; ``available`` says whether they are used."""
    try:
        return " amx_bf16 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class AmxMatrix:
    """See ``engine.cpu.matrix.Matrix``.

    A token's product is identical to the last bit whichever tokens are multiplied beside it.

    Args:
        weights: ``[outputs, inputs]`` each, of bfloat16 numbers in float32.
    """

    def __init__(self, weights: Sequence[mx.array]) -> None:
        kernel = compiled()
        assert kernel is not None
        self._kernel = kernel
        self.stops = list(accumulate((len(weight) for weight in weights), initial=0))
        self._inputs = weights[0].shape[1]
        self._steps = -(-self._inputs // INPUTS)
        self._panels = -(-self.stops[-1] // OUTPUTS)
        self._packed = _packed(weights, self._panels, self._steps)
        self._is_shared = self.stops[-1] * self._inputs >= MIN_SHARED_WEIGHTS

    def __call__(self, x: Floats) -> Floats:
        """See ``Matrix``."""
        width = INPUTS * self._steps
        x = np.ascontiguousarray(x) if width == self._inputs else _widened(x, width)
        return self._multiplied(x, _products, _pieces, run_shared)

    def multiply(self, x: Floats, result: Memory, work: Memory, run: Run) -> Floats | None:
        """See ``Matrix``."""
        if x.shape[1] != INPUTS * self._steps:
            return None
        return self._multiplied(x, result, work, run)

    def _multiplied(self, x: Floats, result: Memory, work: Memory, run: Run) -> Floats:
        """As ``multiply``, for tokens of whole steps."""
        tokens = len(x)
        product: Floats = result.array(
            np.float32, -(-tokens // ROWS) * ROWS, OUTPUTS * self._panels
        )
        steps = min(self._steps, _STEPS)
        pair = 2 * ROWS * steps * INPUTS * PIECES * 2
        most = max(1, _PIECES_BYTES // pair) * 2 * ROWS
        for start in range(0, tokens, most):
            for step in range(0, self._steps, steps):
                self._add_steps(x[start : start + most], step, product[start:], work, run)
        return product[:tokens, : self.stops[-1]]

    def _add_steps(self, x: Floats, step: int, product: Floats, work: Memory, run: Run) -> None:
        """Adds the products of _STEPS steps of inputs to the product, or begins it with them."""
        tokens, blocks = len(x), -(-len(x) // ROWS)
        steps = min(self._steps - step, _STEPS)
        pieces = work.array(np.uint8, blocks * steps * PIECES * TILE_BYTES)
        run(
            self._kernel.split,
            *(x[:, step * INPUTS :].ctypes.data, pieces.ctypes.data, tokens, steps, x.shape[1]),
            parts=blocks,
            is_shared=tokens * steps * INPUTS >= MIN_SHARED,
        )
        run(
            self._kernel.multiply,
            *(self._packed[:, step:].ctypes.data, pieces.ctypes.data, product.ctypes.data),
            *(blocks, steps, self._steps, product.shape[1], int(not step)),
            parts=self._panels,
            is_shared=self._is_shared,
        )


def _packed(weights: Sequence[mx.array], panels: int, steps: int) -> NDArray[np.uint16]:
    """The weights as ``llvm.amx`` reads them; zeros beyond their outputs and inputs."""
    inputs = weights[0].shape[1]
    stacked = np.zeros((panels * OUTPUTS, steps * INPUTS), np.uint16)
    start = 0
    for weight in weights:
        # The upper half of a float32 is a bfloat16; CPUs with these units are little-endian.
        stacked[start : start + len(weight), :inputs] = view(weight).view(np.uint16)[:, 1::2]
        start += len(weight)
    shape = (panels, steps, 2, INPUTS // 2, ROWS, 2)
    packed: NDArray[np.uint16] = weight_memory(stacked.nbytes).view(np.uint16).reshape(shape)
    packed[...] = stacked.reshape(panels, 2, ROWS, steps, INPUTS // 2, 2).transpose(
        0, 3, 1, 4, 2, 5
    )
    return packed


def _widened(x: Floats, width: int) -> Floats:
    """``[tokens, inputs]`` with zeros behind the inputs."""
    wide: Floats = np.zeros((len(x), width), np.float32)
    wide[:, : x.shape[1]] = x
    return wide


_products, _pieces = Scratch(), Scratch()
