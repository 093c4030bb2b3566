"""Products of groups of tokens, each with the weights of its expert, by a compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.compiled_matmul import in_panels
from chairlift.engine.cpu.compiled.jobs import MIN_SHARED_WEIGHTS, Program, Run, run_shared
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import Memory, Scratch, view, weight_memory

available = llvm_kernel.available


class GroupsJob(NamedTuple):
    """A job of a program that multiplies groups of tokens.

    Attributes:
        number: the job's.
        panels: its parts for each group.
    """

    program: Program
    number: int
    panels: int

    def set(self, groups: int) -> None:
        """Sets the number of groups for the next run, at most those of ``build``."""
        self.program.set_parts(self.number, groups * self.panels)


class CompiledExperts:
    """The weights of a layer's experts, as the kernel reads them.

    Args:
        weights: ``[experts, outputs, inputs]``, in float32. The copy is in bfloat16 if that has the
            same numbers.
    """

    def __init__(self, weights: mx.array) -> None:
        kernel = llvm_kernel.compiled()
        assert kernel is not None
        self._set_shape(weights.shape, kernel.outputs)
        numbers = view(weights)
        narrow = not any(np.any(one.view(np.uint32) & np.uint32(0xFFFF)) for one in numbers)
        self._multiply = kernel.bfloat16_groups if narrow else kernel.float32_groups
        # The function's further arguments.
        self._more: tuple[int, ...] = ()
        dtype = np.uint16 if narrow else np.float32
        shape = self._experts, self._panels, self._inputs, kernel.outputs
        self._packed = weight_memory(np.dtype(dtype).itemsize * int(np.prod(shape)))
        panels = self._packed.view(dtype).reshape(shape)
        for one, place in zip(numbers, panels, strict=True):
            bits = (one.view(np.uint32) >> 16).astype(np.uint16) if narrow else one
            place[:] = in_panels(bits, self._panels, kernel.outputs)

    def _set_shape(self, shape: Sequence[int], width: int) -> None:
        """Sets the experts, outputs and inputs of the weights, and the outputs of a panel."""
        self._experts, self._outputs, self._inputs = shape
        self._panels = -(-self._outputs // width)
        self._stride = self._panels * width

    @property
    def count(self) -> int:
        """The number of experts."""
        return self._experts

    @property
    def outputs(self) -> int:
        """The numbers of a product."""
        return self._outputs

    def __call__(self, x: Floats, groups: NDArray[np.int64]) -> Floats:
        """Multiplies each token by its expert's weights.

        Args:
            x: ``[tokens, inputs]``; the tokens of an expert are one after the other.
            groups: ``[groups, 3]``: the expert of each group, its first token, and the number of
                its tokens, at least 1.

        Returns:
            ``[tokens, outputs]``. The next call of any layer may overwrite it, and its rows are not
            adjacent.

        Raises:
            ValueError: a group has another expert than those, or other tokens.
        """
        experts, first, counts = groups.T
        if x.shape[1] != self._inputs or not _are_within(experts, self._experts):
            raise ValueError(f"tokens {x.shape} of experts {experts} do not fit the weights")
        last = first + counts - 1
        if not _are_within(first, len(x)) or not _are_within(last, len(x)) or np.any(first > last):
            raise ValueError(f"groups of {len(x)} tokens begin at {first} and have {counts}")
        x, groups = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(groups, np.int64)
        result: Floats = _products.array(np.float32, len(x), self._stride)
        if len(groups):
            shared = len(groups) * self._outputs * self._inputs >= MIN_SHARED_WEIGHTS
            self._run(x, groups, result, shared, _records, run_shared)
        return result[:, : self._outputs]

    def build(
        self, program: Program, x: Floats, groups: NDArray[np.int64], result: Memory, work: Memory
    ) -> tuple[Floats, GroupsJob]:
        """As a call, by jobs of a program, whose groups are only known when it runs.

        Args:
            x: ``[tokens, inputs]``, contiguous, in memory that stays.
            groups: memory for as many groups as there can be; the program reads it.
            result: memory for the product.
            work: memory for what the jobs compute before it.

        Returns:
            The product, and the job whose groups have to be set.
        """
        product: Floats = result.array(np.float32, len(x), self._stride)
        number = self._run(x, groups, product, True, work, program.add)
        assert isinstance(number, int)
        return product[:, : self._outputs], GroupsJob(program, number, self._panels)

    def _run(
        self,
        x: Floats,
        groups: NDArray[np.int64],
        result: Floats,
        is_shared: bool,
        work: Memory,
        run: Run,
    ) -> object:
        """Writes the products to ``[tokens, stride]``; arguments as those of a call, checked.

        Returns:
            What ``run`` returns for the product.
        """
        return run(
            self._multiply,
            *(self._packed.ctypes.data, x.ctypes.data, result.ctypes.data),
            *(groups.ctypes.data, self._panels, self._inputs, self._stride, *self._more),
            parts=len(groups) * self._panels,
            is_shared=is_shared,
        )


def _are_within(numbers: NDArray[np.int64], stop: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < stop)


_products, _records = Scratch(), Scratch()
