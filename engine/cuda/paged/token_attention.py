"""Attention of single query tokens to their sequences' pages: decode rows, and any prompt token.

A thread block computes one token, the query heads of one key head (a group), and one span of the
visible columns. Each warp of the block goes over different columns with a running maximum and sum;
the warps' results are merged at the end. If a token has several spans, the last of its blocks
merges their results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.constants import constant
from chairlift.engine.cuda.paged.arrays import (
    TokenStep,
    counters,
    scale_array,
    sinks_array,
    softcap_array,
)
from chairlift.engine.cuda.paged.packing import template_of
from chairlift.engine.cuda.source import included

# Head dimensions: all multiples up to the largest.
DIM_MULTIPLE, MAX_DIM = 16, 256
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Head dimensions for which tensor cores are used, if keys are float16 or bfloat16.
TENSOR_DIMS = (64, 128, 192, 256)
# Query heads that a block computes at once; a thread has no registers for more.
MAX_HEADS = 8
# The most columns of a block, by the blocks that a launch would have without splits: few blocks
# would not keep all of the device's processors busy, and many need no splits, each of which costs
# up to a tenth. The first column may lie up to 15 columns behind the split's begin.
SPANS = ((64, 256 + 16), (768, 768 + 16))
MAX_SPAN = 1024 + 16


def token_attention(
    queries: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: TokenStep,
    limit: int,
    scale: float,
    sinks: mx.array | None = None,
    quantization: Quantization | None = None,
    count: int | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of each query token to the columns that it sees; writes the new tokens to the pool.

    Args:
        queries: ``[tokens, heads, 1, dim]``.
        new: ``[tokens, key heads, 1, dim]``; values may have fewer numbers than keys.
        pool: ``[pages, key heads, PAGE_TOKENS, dim]``, contiguous; packed, if there is a
            quantization, and then nothing is written: ``packing.pack`` does that.
        step: the tokens' columns.
        limit: an upper bound of most ``step.lengths``. Tokens that see more are computed in fewer
            blocks than would be fastest.
        scale: factor of the scores.
        sinks: ``[heads]``, or None.
        quantization: that of the pool.
        count: only this many tokens, the first ones, are computed; None: all.
        softcap: see ``cache.pages.kernels.Scoring``.

    Returns:
        ``[count, heads, 1, value dim]`` of the queries' type; undefined for tokens without columns.
    """
    group = queries.shape[1] // pool.keys.shape[1]
    dims = queries.shape[3], new.values.shape[3]
    _compile(queries.dtype, dims, group, sinks is not None, quantization, softcap is not None)
    count = len(queries) if count is None else count
    span = span_of(count * queries.shape[1] // heads_per_block(group), SPANS)
    splits = -(-(limit + 16) // span)
    return _attend(
        *(queries, new, pool, step, scale, sinks, span, splits, quantization, count, softcap)
    )


def heads_per_block(group: int, most: int = MAX_HEADS) -> int:
    """The query heads of a key head that a block computes: a divisor of ``group``."""
    return next(n for n in range(min(group, most), 0, -1) if group % n == 0)


def span_of(blocks: int, spans: Sequence[tuple[int, int]]) -> int:
    """The most columns of a block, if there are so many ``blocks`` without splits.

    ``spans`` are as ``SPANS``.
    """
    return next((span for most, span in spans if blocks <= most), MAX_SPAN)


@functools.cache
def _compile(
    dtype: mx.Dtype,
    dims: tuple[int, int],
    group: int,
    with_sinks: bool,
    quantization: Quantization | None,
    capped: bool,
) -> None:
    """Compiles the kernels for few tokens and for many at the first call; takes seconds each."""
    queries = mx.zeros((1, group, 1, dims[0]), dtype)
    new = KeysValues(*(mx.zeros((1, 1, 1, dim), dtype) for dim in dims))
    sinks = mx.zeros((group,)) if with_sinks else None
    one, zero = (mx.array([number], mx.int32) for number in (1, 0))
    step = TokenStep(mx.zeros((2,), mx.int32), zero, zero, one, one)
    for splits in (1, 2):
        # Each call has a pool of its own: the kernel writes to it.
        pool = empty_pool(dims, dtype, quantization)
        mx.eval(
            _attend(
                *(queries, new, pool, step, 1.0, sinks),
                *(MAX_SPAN, splits, quantization, 1, 1.0 if capped else None),
            )
        )


def empty_pool(
    dims: tuple[int, int], dtype: mx.Dtype, quantization: Quantization | None
) -> KeysValues:
    """A pool of one page with one key head, for keys and values of such dimensions."""
    pages = (mx.zeros((1, 1, PAGE_TOKENS, dim), dtype) for dim in dims)
    return KeysValues(*(map(quantization.pack, pages) if quantization else pages))


def _attend(
    queries: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: TokenStep,
    scale: float,
    sinks: mx.array | None,
    span: int,
    splits: int,
    quantization: Quantization | None,
    tokens: int,
    softcap: float | None,
) -> mx.array:
    """Launches the kernels for the first ``tokens`` tokens."""
    _, heads, _, dim = queries.shape
    value_dim = new.values.shape[3]
    group = heads // pool.keys.shape[1]
    block_heads = heads_per_block(group)
    blocks = heads // block_heads
    tensor = dim in TENSOR_DIMS and queries.dtype != mx.float32
    # Two warps have as much shared memory with long keys as four with shorter ones.
    warps = 2 if tensor and dim > 128 else 4
    many = splits > 1
    out: mx.array
    out, _, _ = _kernel(tensor)(
        inputs=[
            queries,
            *new,
            *pool,
            *step,
            counters(1 << (tokens * blocks - 1).bit_length() if many else 1),
            constant(span, mx.int32),
            scale_array(scale, softcap),
            softcap_array(softcap),
            sinks_array(sinks),
        ],
        template=[
            ("T", queries.dtype),
            ("DIM", dim),
            ("VALUE", value_dim),
            ("HEADS", block_heads),
            ("WARPS", warps),
            ("PAGE", PAGE_TOKENS),
            ("MANY", many),
            ("SINKS", sinks is not None),
            ("CAPPED", softcap is not None),
            *template_of(quantization),
            *([("BFLOAT", queries.dtype == mx.bfloat16)] if tensor else []),
        ],
        grid=(splits * warps * 32, blocks, tokens),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[
            (tokens, heads, 1, value_dim),
            (tokens, heads, splits, value_dim) if many else (1,),
            (tokens, heads, splits, 2) if many else (1,),
        ],
        output_dtypes=[queries.dtype, mx.float32, mx.float32],
    )
    return out


@functools.cache
def _kernel(tensor: bool) -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_token_tensor" if tensor else "chairlift_token",
        input_names=[
            "queries",
            "new_keys",
            "new_values",
            "keys",
            "values",
            *TokenStep._fields,
            "counters",
            "span",
            "scale",
            "cap",
            "sinks",
        ],
        output_names=["out", "partials", "weights"],
        header=included("ptx", "packed_rows"),
        source=included("token_begin", "token_tensor" if tensor else "token_plain", "token_end"),
    )
