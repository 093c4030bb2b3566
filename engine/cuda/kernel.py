"""Decode attention on CUDA: a kernel that reads only a row's own columns of the ring, without mask.

MLX's own attention is five to eight times slower with a mask array than without, and reads the
columns that the mask hides. Here a thread block computes one row, the query heads of one key head
(a group), and one part of the row's columns. Each warp of the block goes over different columns
with a running maximum and sum; the warps' results are merged at the end. If there are few rows,
each is split among several blocks, and a second kernel merges their results.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda import attention_source as source

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Head dimensions for which tensor cores are used, if keys are float16 or bfloat16.
TENSOR_DIMS = (64, 128)
WARPS = 4
# Query heads that a block computes at once; a thread has no registers for more.
MAX_HEADS = 8
# Enough blocks to fill a large GPU (an H200 has 132 multiprocessors).
TARGET_BLOCKS = 512
# A row is split only as far as each block gets this many columns.
MIN_COLUMNS = 64


class KeysValues(NamedTuple):
    """Keys and values of the same shape and type."""

    keys: mx.array
    values: mx.array


def decode_attention(
    queries: mx.array,
    new: KeysValues,
    buffers: KeysValues,
    lengths: mx.array,
    stops: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of one query per row to the newest columns of that row, round the ring.

    Args:
        queries: ``[rows, heads, 1, dim]``.
        new: ``[rows, key heads, 1, dim]``; written to each row's newest column of ``buffers``.
        buffers: ``[at least rows, key heads, columns, dim]``, contiguous.
        lengths: ``[rows]`` int32, how many columns each row's query sees, the newest included.
        stops: ``[rows]`` int32, the column after each row's newest, in ``[1, columns]``.
        scale: factor of the scores.
        sinks: ``[heads]``, or None.

    Returns:
        ``[rows, heads, 1, dim]`` of the queries' type.
    """
    group = queries.shape[1] // buffers.keys.shape[1]
    _compile(queries.dtype, queries.shape[3], group, sinks is not None)
    return _attend(queries, new, buffers, lengths, stops, scale, sinks)


@functools.cache
def _compile(dtype: mx.Dtype, dim: int, group: int, with_sinks: bool) -> None:
    """Compiles the kernels for few rows and for many at the first call; takes seconds for each."""
    queries = mx.zeros((1, group, 1, dim), dtype)
    one, sinks = mx.ones((1,), mx.int32), mx.zeros((group,)) if with_sinks else None
    for columns in (1, 2 * MIN_COLUMNS):
        new, buffers = (mx.zeros((1, 1, width, dim), dtype) for width in (1, columns))
        both = KeysValues(new, new), KeysValues(buffers, buffers)
        mx.eval(_attend(queries, *both, one, one, 1.0, sinks))


def _attend(
    queries: mx.array,
    new: KeysValues,
    buffers: KeysValues,
    lengths: mx.array,
    stops: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Launches the kernels; the fewer rows there are, the more blocks share a row's columns."""
    rows, heads, _, dim = queries.shape
    _, key_heads, columns, _ = buffers.keys.shape
    group = heads // key_heads
    heads_per_block = next(n for n in range(min(group, MAX_HEADS), 0, -1) if group % n == 0)
    blocks = heads // heads_per_block
    splits = min(-(-TARGET_BLOCKS // (rows * blocks)), max(1, columns // MIN_COLUMNS))
    partial = splits > 1
    tensor = dim in TENSOR_DIMS and queries.dtype != mx.float32
    out: mx.array
    out, weights = _kernel(tensor)(
        inputs=[
            queries,
            *new,
            *buffers,
            lengths,
            stops,
            _scale(scale),
            _nothing() if sinks is None else sinks.astype(mx.float32),
        ],
        template=[
            ("T", queries.dtype),
            ("DIM", dim),
            ("HEADS", heads_per_block),
            ("WARPS", WARPS),
            ("PARTIAL", partial),
            ("SINKS", sinks is not None),
            *([("BFLOAT", queries.dtype == mx.bfloat16)] if tensor else []),
        ],
        grid=(splits * WARPS * 32, blocks, rows),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[
            (rows, heads, splits, dim) if partial else (rows, heads, 1, dim),
            (rows, heads, splits, 2) if partial else (1,),
        ],
        output_dtypes=[mx.float32 if partial else queries.dtype, mx.float32],
    )
    if not partial:
        return out
    merged: mx.array
    (merged,) = _merge()(
        inputs=[out, weights],
        template=[("DIM", dim), ("T", queries.dtype)],
        grid=(rows * heads * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[(rows, heads, 1, dim)],
        output_dtypes=[queries.dtype],
    )
    return merged


@functools.cache
def _kernel(tensor: bool) -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_decode_tensor" if tensor else "chairlift_decode",
        input_names=[
            "queries",
            "new_keys",
            "new_values",
            "keys",
            "values",
            "lengths",
            "stops",
            "scale",
            "sinks",
        ],
        output_names=["out", "weights"],
        header=source.HEADER,
        source=source.BEGIN + (source.TENSOR if tensor else source.PLAIN) + source.END,
    )


@functools.cache
def _merge() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_decode_merge",
        input_names=["parts", "weights"],
        output_names=["out"],
        source=source.MERGE,
    )


@functools.cache
def _scale(scale: float) -> mx.array:
    return mx.array([scale * math.log2(math.e)], mx.float32)


@functools.cache
def _nothing() -> mx.array:
    return mx.array([0.0], mx.float32)
