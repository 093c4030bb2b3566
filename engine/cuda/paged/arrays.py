"""The arrays that the kernels take, and those that all layers share."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.constants import constant


class TokenStep(NamedTuple):
    """Which columns each query token sees.

    The tokens of one sequence are neighbours in the step, in the order of their positions.

    Attributes:
        pages: ``[entries]`` int32, a ``page_table`` of the sequences.
        owners: ``[tokens]`` int32, the line of ``pages``.
        begins: ``[tokens]`` int32, the first position of the token's sequence in this step. Keys
            from there on are read from the step's arrays, older ones from the pool.
        lengths: ``[tokens]`` int32, the visible columns, the token's own included; 0: the token is
            not computed.
        stops: ``[tokens]`` int32, the token's position plus one.
    """

    pages: mx.array
    owners: mx.array
    begins: mx.array
    lengths: mx.array
    stops: mx.array


class ChunkStep(NamedTuple):
    """Prompt chunks, in tiles of query tokens; ``tiles.chunk_tiles`` makes the tiles.

    Attributes:
        pages: ``[entries]`` int32, a ``page_table`` of the sequences.
        tiles: ``[tiles and their splits, 8]`` int32: the index of the chunk's first token in the
            arrays, the position of that token, the chunk's tokens, the line of ``pages``, the
            tile's first token within the chunk (a multiple of ``chunk_attention.tile_tokens``), the
            number of the split, the number of the tile's splits, and the tile's first slot for
            their results. The last ones start first. A tile without splits copies the results of
            single tokens from ``decoded``; one of zeros does nothing.
        rows: the rows of a tile, see ``chunk_attention.tile_rows``.
        slots: slots of all tiles that are split, or more.
        lengths: ``[tokens]`` int32, above 0 for single tokens.
        decoded: ``[tokens of rows, heads, 1, dim]``, results of single tokens.
    """

    pages: mx.array
    tiles: mx.array
    rows: int
    slots: int
    lengths: mx.array
    decoded: mx.array


@functools.cache
def counters(count: int) -> mx.array:
    """``[count]`` int32 zeros, in which a launch counts blocks, and which it leaves as zeros."""
    zeros = mx.zeros((count,), mx.int32)
    mx.eval(zeros)
    return zeros


def scale_array(scale: float, softcap: float | None = None) -> mx.array:
    """The factor of scores, with log2(e), because kernels compute powers of two.

    With a ``softcap``, the factor before it.
    """
    factor = math.log2(math.e) if softcap is None else 1 / softcap
    return constant(scale * factor, mx.float32)


def softcap_array(softcap: float | None) -> mx.array:
    """The factor of scores after the cap, with log2(e)."""
    return constant((softcap or 0.0) * math.log2(math.e), mx.float32)


def window_array(window: int | None) -> mx.array:
    """How many columns a token sees at most; None: more than there are."""
    return constant(window or 1 << 30, mx.int32)


def sinks_array(sinks: mx.array | None) -> mx.array:
    """``sinks`` as float32, or something in their place."""
    return constant(0.0, mx.float32) if sinks is None else sinks.astype(mx.float32)
