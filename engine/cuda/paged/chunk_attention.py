"""Attention of prompt chunks to their sequences' pages, on tensor cores, for 16-bit types.

A thread block computes a tile of a chunk's tokens for the query heads of one key head (a group), so
that all of them share the keys and values that it loads. It goes over the visible columns with a
running maximum and sum. If a step has few tiles, or some tiles have many columns, several blocks
compute parts of a tile's columns; the last of them merges their results. ``token_attention``
computes the same, slower, for any type.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS, step_size
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged.arrays import (
    ChunkStep,
    counters,
    scale_array,
    sinks_array,
    softcap_array,
    window_array,
)
from chairlift.engine.cuda.paged.packing import template_of
from chairlift.engine.cuda.paged.token_attention import empty_pool, heads_per_block
from chairlift.engine.cuda.source import included, launch_bounds

# Rows of a tile, pairs of a token and a head. A tall tile reads keys and values less often, but one
# of a row with a draft would be almost empty.
SHORT, TALL = 64, 128
# Steps with at least so many tokens of prompts have tall tiles.
TALL_TOKENS = 128
# Of short heads, queries fit in registers, and tall tiles are no faster. Long heads leave no
# registers for tall tiles.
SHORT_DIM, LONG_DIM = 64, 128
# The compute capabilities of GPUs whose processors have more than 160 KB of shared memory: room for
# two blocks with tall tiles. Others have 100 KB, room for two blocks with short tiles whose queries
# are in registers.
_AMPLE_SHARED = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)}
# Threads of a block.
THREADS = 128
# Query heads that a block computes at most; with more, a tile would have few tokens.
MAX_HEADS = 16


@functools.cache
def ample_shared() -> bool:
    """Whether the GPU has shared memory for tall tiles, and for the queries of short ones."""
    info = mx.device_info()
    names = "compute_capability_major", "compute_capability_minor"
    return tuple(info.get(name) for name in names) in _AMPLE_SHARED


def tile_rows(dim: int, prompt_tokens: int) -> int:
    """The rows of the tiles of a step with so many tokens of prompts."""
    tall = SHORT_DIM < dim <= LONG_DIM and prompt_tokens >= TALL_TOKENS and ample_shared()
    return TALL if tall else SHORT


def tile_tokens(group: int, rows: int) -> int:
    """The tokens of a tile of ``rows`` rows, if ``group`` query heads share a key head."""
    return rows // heads_per_block(group, MAX_HEADS)


def blocks_per_tile(group: int) -> int:
    """The blocks that compute a tile, for each key head."""
    return group // heads_per_block(group, MAX_HEADS)


def block_columns(dim: int) -> int:
    """The columns that a block takes at once: shared memory has room for these."""
    return 32 if dim > 128 else 64


def chunk_attention(
    queries: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: ChunkStep,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    quantization: Quantization | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Causal attention of chunks to their sequences; writes the new tokens to the pool.

    Args:
        queries: ``[tokens, heads, 1, dim]``, float16 or bfloat16.
        new: ``[tokens, key heads, 1, dim]``; values may have fewer numbers than keys.
        pool: ``[pages, key heads, PAGE_TOKENS, dim]``, contiguous; packed, if there is a
            quantization, and then nothing is written: ``packing.pack`` does that.
        step: the chunks, which need not have all of the tokens, and the results of others.
        scale: factor of the scores, positive.
        window: how many columns a token sees at most, its own included; None: all.
        sinks: ``[heads]``, or None.
        quantization: that of the pool.
        softcap: see ``cache.pages.kernels.Scoring``.

    Returns:
        ``[tokens, heads, 1, value dim]`` of the queries' type; undefined for tokens of no tile.
    """
    group = queries.shape[1] // pool.keys.shape[1]
    dims = queries.shape[3], new.values.shape[3]
    _compile(queries.dtype, dims, group, sinks is not None, quantization, softcap is not None)
    return _attend(queries, new, pool, step, scale, window, sinks, quantization, softcap)


@functools.cache
def _compile(
    dtype: mx.Dtype,
    dims: tuple[int, int],
    group: int,
    with_sinks: bool,
    quantization: Quantization | None,
    capped: bool,
) -> None:
    """Compiles the kernel for tiles of each height at the first call; takes seconds."""
    queries = mx.zeros((1, group, 1, dims[0]), dtype)
    new = KeysValues(*(mx.zeros((1, 1, 1, dim), dtype) for dim in dims))
    decoded = mx.zeros((1, group, 1, dims[1]), dtype)
    pool = empty_pool(dims, dtype, quantization)
    sinks = mx.zeros((group,)) if with_sinks else None
    tiles = mx.array([[0, 0, 1, 0, 0, 0, 1, 0]], mx.int32)
    softcap = 1.0 if capped else None
    for rows in {tile_rows(dims[0], tokens) for tokens in (0, TALL_TOKENS)}:
        numbers = mx.zeros((2,), mx.int32), tiles, rows, 0, mx.zeros((1,), mx.int32)
        step = ChunkStep(*numbers, decoded)
        mx.eval(_attend(queries, new, pool, step, 1.0, None, sinks, quantization, softcap))


def _attend(
    queries: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: ChunkStep,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    quantization: Quantization | None,
    softcap: float | None,
) -> mx.array:
    tokens, heads, _, dim = queries.shape
    value_dim = new.values.shape[3]
    block_heads = heads_per_block(heads // pool.keys.shape[1], MAX_HEADS)
    blocks = heads // block_heads
    # A recurring size, so that the memory serves other steps.
    places = step_size(step.slots * blocks)
    mixed: mx.array
    rows, columns = step.rows, block_columns(dim)
    held = rows == SHORT and (dim <= SHORT_DIM or not ample_shared())
    shared = 2 * columns + (0 if held else rows)
    # Registers for three blocks are a few less than the compiler would take.
    longest = SHORT_DIM if held else LONG_DIM
    three = rows == SHORT and dim <= longest and softcap is None
    mixed, _, _ = _kernel(3 if three else 2, shared * (dim + 8) * 2)(
        inputs=[
            queries,
            *new,
            *pool,
            step.pages,
            step.tiles,
            step.lengths,
            step.decoded,
            counters(1 << (places - 1).bit_length() if places else 1),
            scale_array(scale, softcap),
            softcap_array(softcap),
            window_array(window),
            sinks_array(sinks),
        ],
        template=[
            ("T", queries.dtype),
            ("BFLOAT", queries.dtype == mx.bfloat16),
            ("DIM", dim),
            ("VALUE", value_dim),
            ("COLUMNS", columns),
            ("ROWS", rows),
            ("HEADS", block_heads),
            ("HELD", held),
            ("PAGE", PAGE_TOKENS),
            ("SINKS", sinks is not None),
            ("CAPPED", softcap is not None),
            *template_of(quantization),
        ],
        grid=(blocks * THREADS, step.tiles.shape[0], 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[
            (tokens, heads, 1, value_dim),
            (max(1, places), rows, value_dim),
            (max(1, places), rows, 2),
        ],
        output_dtypes=[queries.dtype, mx.float32, mx.float32],
    )
    return mixed


@functools.cache
def _kernel(blocks: int, shared_bytes: int) -> Any:
    """The kernel; so many ``blocks`` fit on a processor."""
    return mx.fast.cuda_kernel(
        name="chairlift_chunk",
        input_names=[
            "queries",
            "new_keys",
            "new_values",
            "keys",
            "values",
            "pages",
            "tiles",
            "lengths",
            "decoded",
            "counters",
            "scale",
            "cap",
            "window",
            "sinks",
        ],
        output_names=["out", "partials", "weights"],
        header=included("ptx", "packed_rows") + launch_bounds(THREADS, blocks),
        source=included("chunk"),
        shared_memory=shared_bytes,
    )
