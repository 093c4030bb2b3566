"""Attention of single query tokens to their sequences' pages: decode rows, and any prompt token.

A thread block computes one token, the query heads of one key head (a group), and one split of the
visible columns, then the next item of this work. Each warp of the block goes over different columns
with a running maximum and sum; the warps' results are merged at the end. If a token has several
splits, the last of its blocks merges their results.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.engine.cuda.paged import token_source as source
from chairlift.engine.cuda.paged.arrays import (
    KeysValues,
    TokenStep,
    offset_array,
    scale_array,
    sinks_array,
)
from chairlift.engine.cuda.paged.ptx import HEADER

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Head dimensions for which tensor cores are used, if keys are float16 or bfloat16.
TENSOR_DIMS = (64, 128, 192, 256)
WARPS = 4
# Query heads that a block computes at once; a thread has no registers for more.
MAX_HEADS = 8
# Blocks of a launch: three for each multiprocessor of an H200, which has registers for no more.
BLOCKS = 3 * 132
# Items of work that a block gets, or more. More items are distributed more evenly, and cost merges.
ROUNDS = 4
# The least columns of a split, in units of 16.
MIN_UNITS = 8
# Tokens of a launch; each block has a list of them in shared memory.
MAX_TOKENS = 1024


def token_attention(
    queries: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: TokenStep,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of each query token to the columns that it sees; writes the new tokens to the pool.

    Args:
        queries: ``[tokens, heads, 1, dim]``.
        new: ``[tokens, key heads, 1, dim]``.
        pool: ``[pages, key heads, PAGE_TOKENS, dim]``, contiguous.
        step: the tokens' columns.
        scale: factor of the scores.
        sinks: ``[heads]``, or None.

    Returns:
        ``[tokens, heads, 1, dim]`` of the queries' type.
    """
    group = queries.shape[1] // pool.keys.shape[1]
    _compile(queries.dtype, queries.shape[3], group, sinks is not None)
    parts = [
        _attend(queries, new, pool, step, scale, sinks, first)
        for first in range(0, len(queries), MAX_TOKENS)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@functools.cache
def _compile(dtype: mx.Dtype, dim: int, group: int, with_sinks: bool) -> None:
    """Compiles the kernels for few tokens and for many at the first call; takes seconds each."""
    queries, new = (mx.zeros((1, heads, 1, dim), dtype) for heads in (group, 1))
    sinks = mx.zeros((group,)) if with_sinks else None
    one, zero = (mx.array([number], mx.int32) for number in (1, 0))
    step = TokenStep(mx.zeros((1, 1), mx.int32), zero, zero, one, one)
    # The kernel writes to the pool.
    pool = KeysValues(*(mx.zeros((1, 1, PAGE_TOKENS, dim), dtype) for _ in range(2)))
    mx.eval(_attend(queries, KeysValues(new, new), pool, step, 1.0, sinks, 0))


def _attend(
    queries: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: TokenStep,
    scale: float,
    sinks: mx.array | None,
    first: int,
) -> mx.array:
    """Launches the kernel for ``MAX_TOKENS`` tokens, or as many as there are, from ``first`` on."""
    _, heads, _, dim = queries.shape
    tokens = min(len(queries) - first, MAX_TOKENS)
    group = heads // pool.keys.shape[1]
    heads_per_block = _heads_per_block(group)
    blocks = heads // heads_per_block
    # Splits of all tokens, at most.
    works = tokens + -(-BLOCKS * ROUNDS // blocks)
    tensor = dim in TENSOR_DIMS and queries.dtype != mx.float32
    out: mx.array
    out, _, _ = _kernel(tensor)(
        inputs=[
            queries,
            *new,
            *pool,
            *step,
            offset_array(first),
            _counters(MAX_TOKENS * blocks),
            scale_array(scale),
            sinks_array(sinks),
        ],
        template=[
            ("T", queries.dtype),
            ("DIM", dim),
            ("HEADS", heads_per_block),
            ("WARPS", WARPS),
            ("PAGE", PAGE_TOKENS),
            ("TOKENS", max(WARPS * 32, 1 << (tokens - 1).bit_length())),
            ("ROUNDS", ROUNDS),
            ("MIN_UNITS", MIN_UNITS),
            ("SINKS", sinks is not None),
            *([("BFLOAT", queries.dtype == mx.bfloat16)] if tensor else []),
        ],
        grid=(min(BLOCKS, works * blocks) * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[
            (tokens, heads, 1, dim),
            (works, heads, dim),
            (works, heads, 2),
        ],
        output_dtypes=[queries.dtype, mx.float32, mx.float32],
    )
    return out


@functools.cache
def _counters(count: int) -> mx.array:
    """``[count]`` int32 zeros, in which a launch counts blocks, and which it leaves as zeros."""
    counters = mx.zeros((count,), mx.int32)
    mx.eval(counters)
    return counters


def _heads_per_block(group: int) -> int:
    return next(n for n in range(min(group, MAX_HEADS), 0, -1) if group % n == 0)


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
            "offsets",
            "counters",
            "scale",
            "sinks",
        ],
        output_names=["out", "partials", "weights"],
        header=HEADER,
        source=source.BEGIN + (source.TENSOR if tensor else source.PLAIN) + source.END,
    )
