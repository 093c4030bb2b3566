"""Cuts the prompt chunks of a step into tiles, which ``chunk_attention`` computes in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.step import ChunkPlace, StepTokens
from chairlift.engine.cuda.paged.arrays import ChunkStep
from chairlift.engine.cuda.paged.chunk_attention import block_columns, blocks_per_tile, tile_tokens

# A tile's columns are split if there are fewer blocks than this, about four for each processor of a
# large GPU, or if the tile has much more than its share of all columns.
BLOCKS = 528
# The least columns of a split: merging takes as long as a few hundred columns.
MIN_COLUMNS = 512


def chunk_step(
    tables: mx.array,
    tokens: StepTokens,
    key_heads: int,
    group: int,
    dim: int,
    window: int | None,
) -> ChunkStep:
    """The tiles of a step's chunks, which are counted from the first chunk's first token.

    Args:
        tables: ``[sequences, width]`` int32.
        tokens: the step's tokens; all layers of the same form share the tiles.
        group: query heads that share a key head.
        dim: the size of a head.
        window: how many columns a token sees at most, its own included; None: all.
    """
    form = (key_heads, group, dim, window)
    if form not in tokens.tiles:
        tokens.tiles[form] = chunk_tiles(tokens.chunks, *form)
    tiles, slots = tokens.tiles[form]
    return ChunkStep(tables, tiles, slots)


def chunk_tiles(
    chunks: Sequence[ChunkPlace], key_heads: int, group: int, dim: int, window: int | None
) -> tuple[mx.array, int]:
    """``ChunkStep.tiles`` and its ``slots``; see ``chunk_step``."""
    size, columns = tile_tokens(group), block_columns(dim)
    tiles: list[tuple[int, ...]] = []
    units: list[int] = []
    for chunk in chunks:
        for start in range(0, chunk.tokens, size):
            first = chunk.position + start
            stop = min(first + size, chunk.position + chunk.tokens)
            oldest = max(0, first + 1 - window) if window else 0
            units.append(math.ceil(stop / columns) - oldest // columns)
            place = (chunk.token - chunks[0].token, chunk.position, chunk.tokens, chunk.sequence)
            tiles.append((*place, start))
    share = math.ceil(sum(units) * key_heads * blocks_per_tile(group) / BLOCKS)
    most = max(share, MIN_COLUMNS // columns)
    split: list[tuple[int, ...]] = []
    slots = 0
    for number in sorted(range(len(tiles)), key=lambda number: min(units[number], most)):
        splits = math.ceil(units[number] / most)
        split += [(*tiles[number], part, splits, slots) for part in range(splits)]
        slots += splits if splits > 1 else 0
    return mx.array(np.array(split, np.int32)), slots
