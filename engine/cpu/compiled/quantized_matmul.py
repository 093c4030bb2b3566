"""Products with quantized weights, which keep the size of their codes.

Where the CPU multiplies bytes (VNNI), ``llvm.dot`` computes them, and ``llvm.quantized`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts
from chairlift.engine.cpu.compiled.compiled_matmul import CompiledMatrix
from chairlift.engine.cpu.compiled.jobs import MIN_SHARED, Run, run_shared
from chairlift.engine.cpu.compiled.llvm import dot
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.llvm.digits import token_bytes
from chairlift.engine.cpu.compiled.llvm.dot import DotKernel
from chairlift.engine.cpu.compiled.llvm.kernel import Kernel
from chairlift.engine.cpu.compiled.quantized_weight import PanelLayout, Quantized
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import Memory, Scratch

available = llvm_kernel.available


def has_tiles() -> bool:
    """Whether the CPU's matrix units multiply bytes; see ``llvm.dot_amx``."""
    kernel = dot.compiled()
    return kernel is not None and kernel.tiles


def quantized_matrix(weights: Sequence[Quantized]) -> CompiledMatrix:
    """The fastest matrix of this CPU for weights ``[outputs, inputs]``; see ``Matrix``.

    The weights have the same groups and bits.
    """
    return DotMatrix(weights) if dot.compiled() else QuantizedMatrix(weights)


def quantized_experts(weight: Quantized) -> CompiledExperts:
    """The fastest experts of this CPU for a weight ``[experts, outputs, inputs]``."""
    return DotExperts(weight) if dot.compiled() else QuantizedExperts(weight)


def panel_bytes(weight: Quantized) -> int:
    """The bytes that the panels of a weight take."""
    return weight.panel_bytes(_layout())


class QuantizedMatrix(CompiledMatrix):
    """See ``quantized_matrix``; a weight becomes float32 in a register."""

    def __init__(self, weights: Sequence[Quantized]) -> None:
        kernel, weight = _kernel(), Quantized.joined(weights)
        self._set_shape([one.shape[0] for one in weights], weight.shape[1], kernel.outputs)
        self._multiply = getattr(kernel, weight.kind)
        self._more = (weight.group,)
        self._packed = weight.packed(PanelLayout(kernel.lanes, by_quads=False))


class QuantizedExperts(CompiledExperts):
    """See ``quantized_experts``; a weight becomes float32 in a register."""

    def __init__(self, weight: Quantized) -> None:
        kernel = _kernel()
        self._set_shape(weight.shape, kernel.outputs)
        self._multiply = getattr(kernel, f"{weight.kind}_groups")
        self._more = (weight.group,)
        self._packed = weight.packed(PanelLayout(kernel.lanes, by_quads=False)).reshape(-1)


class DotMatrix(CompiledMatrix):
    """See ``quantized_matrix``; tokens are multiplied as digits."""

    def __init__(self, weights: Sequence[Quantized]) -> None:
        kernel, weight = _dot_kernel(), Quantized.joined(weights)
        self._set_shape([one.shape[0] for one in weights], weight.shape[1], kernel.outputs)
        self._multiply = getattr(kernel, weight.kind)
        self._tokens = _TokenDigits(kernel, weight)
        self._packed = weight.packed(PanelLayout(kernel.lanes, by_quads=True))

    def __call__(self, x: Floats) -> Floats:
        """See ``Matrix``."""
        return self.multiply(np.ascontiguousarray(x), _products, _records, run_shared)

    def multiply(self, x: Floats, result: Memory, work: Memory, run: Run) -> Floats:
        """See ``Matrix``."""
        product: Floats = result.array(np.float32, len(x), self._stride)
        if len(x):
            records = self._tokens.write(x, work, run)
            run(
                self._multiply,
                *(self._packed.ctypes.data, records.ctypes.data, product.ctypes.data, len(x)),
                *(self._tokens.groups, self._stride, self._tokens.group),
                parts=self._panels,
                is_shared=self._is_shared,
            )
        return product[:, : self.stops[-1]]


class DotExperts(CompiledExperts):
    """See ``quantized_experts``; tokens are multiplied as digits."""

    def __init__(self, weight: Quantized) -> None:
        kernel = _dot_kernel()
        self._set_shape(weight.shape, kernel.outputs)
        self._multiply = getattr(kernel, f"{weight.kind}_groups")
        self._tokens = _TokenDigits(kernel, weight)
        self._packed = weight.packed(PanelLayout(kernel.lanes, by_quads=True)).reshape(-1)

    def _run(
        self,
        x: Floats,
        groups: NDArray[np.int64],
        result: Floats,
        is_shared: bool,
        work: Memory,
        run: Run,
    ) -> object:
        records = self._tokens.write(x, work, run)
        return run(
            self._multiply,
            *(self._packed.ctypes.data, records.ctypes.data, result.ctypes.data),
            *(groups.ctypes.data, self._panels, self._tokens.groups),
            *(self._stride, self._tokens.group),
            parts=len(groups) * self._panels,
            is_shared=is_shared,
        )


class _TokenDigits:
    """Writes tokens as ``llvm.dot`` reads them.

    Attributes:
        groups: the groups of inputs.
        group: the inputs of a group.
    """

    def __init__(self, kernel: DotKernel, weight: Quantized) -> None:
        self._digits = kernel.digits
        self.group = weight.group
        self.groups = weight.shape[-1] // weight.group

    def write(self, x: Floats, work: Memory, run: Run) -> NDArray[np.uint8]:
        """The records of tokens ``[tokens, inputs]``, contiguous."""
        records = work.array(np.uint8, len(x), token_bytes(x.shape[1], self.group))
        run(
            self._digits,
            *(x.ctypes.data, records.ctypes.data, self.groups, self.group),
            parts=len(x),
            is_shared=x.size >= MIN_SHARED,
        )
        return records


def _layout() -> PanelLayout:
    kernel = dot.compiled()
    if kernel is not None:
        return PanelLayout(kernel.lanes, by_quads=True)
    return PanelLayout(_kernel().lanes, by_quads=False)


def _kernel() -> Kernel:
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    return kernel


def _dot_kernel() -> DotKernel:
    kernel = dot.compiled()
    assert kernel is not None
    return kernel


_products, _records = Scratch(), Scratch()
