"""A CUDA kernel that adds the products of few tokens' adapters to a layer's outputs.

MLX needs three operations for them, and a step of few rows takes as long as its launches. Each
block of the kernel computes its token's product with the matrix A again, which is cheaper.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import mlx.core as mx

from chairlift.engine.cuda.source import included
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

# With more tokens or wider matrices, MLX's products on tensor cores should be faster; that is not
# measured.
MAX_TOKENS = 64
MAX_RANK = 64
# Numbers that a lane reads at once.
WIDE = 8
_WARPS = 8
_TILE = 2048
_TRIAL = Trial(
    elementwise(0.02),
    log,
    error="no CUDA kernel for adapters, MLX's operations are used: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for adapters is wrong on this device; MLX's operations are used",
)


def is_fit(inputs: int, rank: int) -> bool:
    """Whether the kernel takes matrices A of this shape."""
    return inputs % WIDE == 0 and 0 < rank <= MAX_RANK


def add_low_rank(y: mx.array, x: mx.array, own: mx.array, a: mx.array, b: mx.array) -> mx.array:
    """Adds to each token's outputs the product of its inputs with its adapter's matrices.

    Args:
        y: ``[tokens, outputs]``.
        x: ``[tokens, inputs]``, of the type of ``y``, as are the matrices.
        own: ``[tokens]`` int32, the adapter of each token, below 0 for none.
        a: ``[adapters, rank, inputs]``.
        b: ``[adapters, rank, outputs]``.
    """
    tokens, outputs = y.shape
    _, rank, inputs = a.shape
    result: mx.array
    (result,) = _add()(
        inputs=[y, x, own, a, b],
        template=[
            *(("T", y.dtype), ("IN", inputs), ("OUT", outputs), ("RANK", rank)),
            *(("WIDE", WIDE), ("WARPS", _WARPS), ("TILE", _TILE)),
        ],
        grid=(-(-outputs // _TILE) * _WARPS * 32, tokens, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(tokens, outputs)],
        output_dtypes=[y.dtype],
    )
    return result


@functools.cache
def works() -> bool:
    """Whether the kernel compiles here and computes the same as MLX's operations."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    tokens, inputs, outputs, rank, adapters = 3, 4096, 2100, 12, 2
    keys = mx.random.split(mx.random.key(0), 4)
    x = mx.random.normal((tokens, inputs), mx.bfloat16, scale=0.02, key=keys[0])
    y = mx.random.normal((tokens, outputs), mx.bfloat16, key=keys[1])
    a = mx.random.normal((adapters, rank, inputs), mx.bfloat16, key=keys[2])
    b = mx.random.normal((adapters, rank, outputs), mx.bfloat16, key=keys[3])
    own = [1, -1, 0]

    def mlx() -> mx.array:
        added = [y[t] if s < 0 else y[t] + (x[t] @ a[s].T) @ b[s] for t, s in enumerate(own)]
        return mx.stack(added)

    return _TRIAL.passes(mlx, lambda: add_low_rank(y, x, mx.array(own, mx.int32), a, b))


@functools.cache
def _add() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_add_low_rank",
        input_names=["y", "x", "own", "a", "b"],
        output_names=["out"],
        source=included("products/low_rank"),
    )
