"""Weights as products outside of MLX read them: by AMX, by a compiled kernel, or by the BLAS.

A product of few tokens takes as long as reading the weights, so fewer bytes are fewer milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import mlx.core as mx

from chairlift.engine.cpu import blas_matmul
from chairlift.engine.cpu.compiled import amx_matmul, compiled_matmul
from chairlift.engine.cpu.compiled.jobs import Run
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import Memory

# Up to this many tokens, reading the weights takes longer than multiplying.
FEW_TOKENS = 64
# Compiled kernels multiply at least as fast as a BLAS, and are disturbed less by other processes.
MANY_TOKENS = 4096


class Matrix(Protocol):
    """The stacked weights of layers that read the same input."""

    @property
    def stops(self) -> Sequence[int]:
        """The first output of each layer, and the end of the last."""
        ...

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``, as exact as in float32.

        The next call of any matrix may overwrite the result, whose rows need not be adjacent.
        """
        ...

    def multiply(self, x: Floats, result: Memory, work: Memory, run: Run) -> Floats | None:
        """As a call, by jobs that ``run`` computes, perhaps later.

        Args:
            x: contiguous.
            result: memory for the product.
            work: memory for what the jobs compute before it.

        Returns:
            The product; None if it cannot be computed by jobs.
        """
        ...


class Backend(NamedTuple):
    """One way of multiplying.

    Attributes:
        name: for the log.
        make: makes a matrix of layers' weights, ``[outputs, inputs]`` each, in float32.
        needs_bf16: the weights have to be bfloat16 numbers.
        max_tokens: products of more tokens are faster in MLX.
        copy_bytes: bytes of a weight's copy for each number, if all are bfloat16 numbers, and if
            they are not.
    """

    name: str
    make: Callable[[Sequence[mx.array]], Matrix]
    needs_bf16: bool
    max_tokens: int
    copy_bytes: tuple[int, int]


def backends() -> list[Backend]:
    """The backends for matrix products that this machine has, the fastest first."""
    amx = Backend("AMX", amx_matmul.AmxMatrix, True, MANY_TOKENS, copy_bytes=(2, 2))
    compiled = Backend(
        *("compiled kernel", compiled_matmul.CompiledMatrix, False, MANY_TOKENS), copy_bytes=(2, 4)
    )
    blas = Backend("BLAS", blas_matmul.BlasMatrix, False, FEW_TOKENS, copy_bytes=(0, 0))
    modules = ((amx_matmul, amx), (compiled_matmul, compiled), (blas_matmul, blas))
    return [backend for module, backend in modules if module.available()]


def apart(product: Floats, stops: Sequence[int]) -> list[Floats]:
    """Views of a product's columns, one for each layer."""
    return [product[:, start:stop] for start, stop in pairwise(stops)]
