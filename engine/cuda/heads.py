"""Two CUDA kernels for the operations between a transformer block's matrix products.

``split_heads`` splits the fused product of queries, keys and values, and applies biases, head norms
and rotary embedding. ``swiglu`` turns the fused product of gate and up into their SwiGLU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.constants import constant
from chairlift.engine.cuda.source import included

_WARPS = 4
_THREADS = 256
# Numbers that each thread of SwiGLU computes.
WIDE = 8


class HeadNorms(NamedTuple):
    """The RMS norms of query heads and of key heads: weights ``[dim]``."""

    query: mx.array
    key: mx.array
    eps: float


@dataclass(frozen=True, eq=False)
class Heads:
    """The form of an attention layer's heads.

    Attributes:
        heads: number of query heads.
        key_heads: number of key heads, and of value heads.
        dim: numbers of one head.
        frequencies: ``[pairs]`` float32, the angle by which one position rotates each pair. The
            first ``2 * pairs`` numbers of a head are rotated, number i together with i + pairs.
        norms: None if heads are not normalized.
        bias: ``[(heads + 2 * key_heads) * dim]``, or None.
    """

    heads: int
    key_heads: int
    dim: int
    frequencies: mx.array
    norms: HeadNorms | None
    bias: mx.array | None


class SplitHeads(NamedTuple):
    """Queries ``[rows, heads, length, dim]``; keys, values ``[rows, key heads, length, dim]``."""

    queries: mx.array
    keys: mx.array
    values: mx.array


def split_heads(product: mx.array, positions: mx.array, heads: Heads) -> SplitHeads:
    """Splits a product into queries, keys and values, with biases, norms and rotary embedding.

    Args:
        product: ``[rows, length, (heads + 2 * key_heads) * dim]``.
        positions: ``[rows]`` int32, the position of each row's first token.
    """
    rows, length, _ = product.shape
    nothing = constant(0.0, product.dtype)
    norms = heads.norms or HeadNorms(nothing, nothing, 0.0)
    counts = heads.heads, heads.key_heads, heads.key_heads
    outputs = _split()(
        inputs=[
            product,
            positions,
            heads.frequencies,
            norms.query,
            norms.key,
            constant(norms.eps, mx.float32),
            nothing if heads.bias is None else heads.bias,
        ],
        template=[
            ("T", product.dtype),
            ("HEADS", heads.heads),
            ("KEY_HEADS", heads.key_heads),
            ("DIM", heads.dim),
            ("TURNED", 2 * heads.frequencies.size),
            ("NORMS", heads.norms is not None),
            ("BIAS", heads.bias is not None),
            ("WARPS", _WARPS),
        ],
        grid=(-(-sum(counts) // _WARPS) * _WARPS * 32, rows * length, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, count, length, heads.dim) for count in counts],
        output_dtypes=[product.dtype] * 3,
    )
    return SplitHeads(*outputs)


def swiglu(product: mx.array) -> mx.array:
    """``silu(gate) * up`` of ``[rows, length, gate and up]``; both have a multiple of WIDE numbers.

    Returns:
        ``[rows, length, numbers of gate]``.
    """
    rows, length, both = product.shape
    width = both // 2
    out: mx.array
    (out,) = _swiglu()(
        inputs=[product],
        template=[("T", product.dtype)],
        grid=(-(-rows * length * width // WIDE // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, length, width)],
        output_dtypes=[product.dtype],
    )
    return out


@functools.cache
def _split() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_split_heads",
        input_names=[
            "product",
            "positions",
            "frequencies",
            "query_norm",
            "key_norm",
            "eps",
            "bias",
        ],
        output_names=["queries", "keys", "values"],
        source=included("split_heads"),
    )


@functools.cache
def _swiglu() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_swiglu",
        input_names=["product"],
        output_names=["out"],
        source=included("swiglu"),
    )
