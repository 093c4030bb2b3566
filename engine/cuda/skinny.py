"""Products of few tokens with a weight (skinny GEMMs), with what comes before and after them.

Such a product takes as long as reading the weight once, and little more to launch. MLX asks cuBLAS
how to compute each product, which takes the host several times as long as launching a kernel, and
it launches norm, SwiGLU and the sum with the residual separately. A step of few tokens takes as
long as the host needs to launch it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.linear import Linear

from chairlift.engine.cuda.constants import constant
from chairlift.engine.cuda.source import included, launch_bounds
from chairlift.engine.model.trials.trial import Trial, within_largest

log = logging.getLogger(__name__)

DTYPES = (mx.bfloat16, mx.float16)
# The kernel reads at most this many numbers of a weight row at a time, and this many rows together.
STEP, ROWS = 64, 16
# A larger weight takes so long to read that its launch does not matter.
MAX_BYTES = 512 << 20
# The most tokens of a product: on an H200, cuBLAS needs two thirds of the time for 32.
MAX_TOKENS = 16
# An H200's processors. One block on each, with a sixteenth of the inputs for each warp, reads a
# small weight fastest; larger weights need more and smaller blocks (measured there).
_PROCESSORS = 132
# Times 16 rows of a block at most: a thread has no registers for more.
_MAX_ROWS = 4
_TRIAL = Trial(
    within_largest(0.02),
    log,
    error="no CUDA kernel for products of few tokens: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for products of few tokens is wrong on this device; it is not used",
)


class Norm(NamedTuple):
    """An RMS norm: its weight ``[inputs]``, and what is added to the mean square."""

    weight: mx.array
    eps: float


def is_fit(weight: mx.array) -> bool:
    """Whether the kernel can read a weight ``[outputs, inputs]``."""
    outputs, inputs = weight.shape
    return weight.dtype in DTYPES and outputs % (2 * ROWS) == 0 and inputs % STEP == 0


def skinny_product(
    x: mx.array,
    weight: mx.array,
    norm: Norm | None = None,
    gated: bool = False,
    to: mx.array | None = None,
) -> mx.array:
    """Multiplies tokens with a weight.

    Args:
        x: ``[tokens, inputs]``, at most ``MAX_TOKENS``.
        weight: ``[outputs, inputs]``, contiguous; must be fit.
        norm: applied to ``x`` before; of bfloat16, because numbers before a norm may exceed those
            of float16.
        gated: the weight's first half is a gate, the second half is up; the result is their SwiGLU.
        to: ``[tokens, outputs]``, added to the result; None: nothing.

    Returns:
        ``[tokens, outputs]``, or half as many outputs if ``gated``.
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    tiles = 1 if tokens <= 8 else 2
    rows, warps = block_of(outputs // ROWS, gated)
    blocks = outputs // (ROWS * rows)
    # A thread has registers to read this many rows twice as far at once.
    parts = 2 if rows <= 2 and (norm is None or tiles == 1) else 1
    nothing = constant(0.0, x.dtype)
    result: mx.array
    (result,) = _kernel(warps)(
        inputs=[
            x,
            weight,
            nothing if norm is None else norm.weight,
            constant(0.0 if norm is None else norm.eps, mx.float32),
            nothing if to is None else to,
        ],
        template=[
            *(("T", x.dtype), ("BFLOAT", x.dtype == mx.bfloat16)),
            *(("NORM", norm is not None), ("GATED", gated), ("ADD", to is not None)),
            *(("WARPS", warps), ("ROWS", rows), ("PARTS", parts), ("TILES", tiles)),
        ],
        grid=(blocks * warps * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(tokens, outputs // 2 if gated else outputs)],
        output_dtypes=[x.dtype],
    )
    return result


def block_of(all_rows: int, gated: bool) -> tuple[int, int]:
    """The rows and the warps of a block.

    Args:
        all_rows: of the weight. These and the rows of a block are multiples of ``ROWS``.
    """
    each = 2 if gated else 1  # rows of gate and of up
    wanted = min(max(each, -(-all_rows // _PROCESSORS)), _MAX_ROWS)
    rows = next(n for n in range(wanted, 0, -1) if n % each == 0 and all_rows % n == 0)
    blocks = all_rows // rows
    return rows, next(
        n for n, most in ((16, 1.5), (8, 2.5), (4, math.inf)) if blocks <= most * _PROCESSORS
    )


class SkinnyLinear(Linear):
    """A layer without bias that multiplies few tokens with ``skinny_product``."""

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x.size // x.shape[-1]
        # MLX's kernel for a single token does not ask cuBLAS.
        if 1 < tokens <= MAX_TOKENS and x.dtype == self.weight.dtype:
            flat = skinny_product(x.reshape(tokens, -1), self.weight)
            return flat.reshape(*x.shape[:-1], -1)
        return super().__call__(x)


def install(model: Any, fused: Sequence[Any]) -> None:
    """Replaces the linear layers of a model.

    Args:
        fused: the ``fused_linear.Product``s that take the place of some layers.
    """
    inside = {id(layer) for product in fused for layer in product.layers}
    for module in model.modules():
        if type(module) is not Linear or id(module) in inside or "bias" in module:
            continue
        weight = module.weight
        if weight.nbytes <= MAX_BYTES and is_fit(weight) and kernel_works(weight.dtype):
            module.__class__ = SkinnyLinear


@functools.cache
def kernel_works(dtype: mx.Dtype) -> bool:
    """Whether the kernel computes what MLX's own operations do, with such weights."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    keys = mx.random.split(mx.random.key(0), 4)
    inputs, outputs = 1024, 6 * ROWS
    weight = mx.random.normal((outputs, inputs), dtype, scale=inputs**-0.5, key=keys[0])
    x = mx.random.normal((MAX_TOKENS, inputs), dtype, key=keys[1])
    to = mx.random.normal((MAX_TOKENS, outputs), dtype, key=keys[2])
    norm = Norm(mx.random.normal((inputs,), dtype, key=keys[3]), 1e-5)

    def expected() -> mx.array:
        gate, up = mx.split(mx.fast.rms_norm(x, *norm) @ weight.T, 2, axis=1)
        return mx.concatenate([to + x @ weight.T, gate * mx.sigmoid(gate) * up], axis=1)

    def ours() -> mx.array:
        # The norm of float16 is never computed by the kernel.
        normed = (x, norm) if dtype == mx.bfloat16 else (mx.fast.rms_norm(x, *norm), None)
        parts = [
            mx.concatenate(
                [
                    skinny_product(x[:count], weight, to=to[:count]),
                    skinny_product(normed[0][:count], weight, normed[1], gated=True),
                ],
                axis=1,
            )
            for count in (MAX_TOKENS, 5)
        ]
        mx.eval(parts)
        return mx.concatenate([parts[1], parts[0][5:]])

    return _TRIAL.passes(expected, ours)


@functools.cache
def _kernel(warps: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"chairlift_skinny_product_{warps}",
        input_names=["x", "weight", "norm", "eps", "to"],
        output_names=["out"],
        header=included("ptx") + launch_bounds(warps * 32, 1),
        source=included("products/skinny"),
    )
