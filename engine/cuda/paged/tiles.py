"""Cuts the tokens of a step with chunks into tiles, which ``chunk_attention`` computes in blocks.

The number of tiles, and that of their slots, depend on the step's size alone: tiles of zeros fill
them up, whose blocks end at once. So launches recur, and a step can be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.page import doubled
from chairlift.cache.pages.step import CHUNK_LINES, ChunkPlace, StepTokens, Table, Tiles, uploaded
from chairlift.engine.cuda.paged.arrays import ChunkStep
from chairlift.engine.cuda.paged.chunk_attention import block_columns, blocks_per_tile, tile_tokens

# A tile's columns are split if there are fewer blocks than this, about four for each processor of a
# large GPU, or if the tile has much more than its share of all columns.
BLOCKS = 528
# The least columns of a split: merging takes as long as a few hundred columns.
MIN_COLUMNS = 512
# Numbers of a tile; see ``ChunkStep``.
NUMBERS = 8


class Form(NamedTuple):
    """What the tiles of a layer depend on; layers of the same form share them.

    Attributes:
        key_heads: key heads.
        group: query heads that share a key head.
        dim: the size of a head.
        window: how many columns a token sees at most, its own included; None: all.
    """

    key_heads: int
    group: int
    dim: int
    window: int | None


def chunk_step(tables: mx.array, tokens: StepTokens, form: Form, decoded: mx.array) -> ChunkStep:
    """The tiles of a step's chunks, and of the rows that are computed already.

    Args:
        tables: ``[sequences, width]`` int32.
        tokens: the step's tokens.
        decoded: see ``ChunkStep``.
    """
    tile(tokens, form)
    tiles = tokens.tiles[form]
    return ChunkStep(tables, tiles.array, tiles.slots, decoded)


def tile(tokens: StepTokens, form: Form) -> None:
    """Makes the tiles of a form, if the step has none."""
    if form not in tokens.tiles:
        size = tokens.arrays.stops.size
        found, slots = chunk_tiles(tokens.chunks, tokens.rows, form)
        count, slots_of_all = tile_limits(size, len(tokens.chunks), form)
        assert len(found) <= count, (len(found), count)
        assert slots <= slots_of_all, (slots, slots_of_all)
        found = np.pad(found, ((count - len(found), 0), (0, 0)))
        (array,) = uploaded([found])
        tokens.tiles[form] = Tiles(array, slots_of_all)


def tile_limits(tokens: int, chunks: int, form: Form) -> tuple[int, int]:
    """The number of tiles for any step of these sizes, and of their slots.

    The last tile of the rows and of each chunk may not be full. Splits add at most ``BLOCKS``
    blocks to all tiles together, and a tile that is split has less than twice its share of these.
    """
    more = BLOCKS // (form.key_heads * blocks_per_tile(form.group)) + 1
    begun = doubled(CHUNK_LINES, chunks + 1)
    return tokens // tile_tokens(form.group) + begun + more, 2 * more


def chunk_tiles(chunks: Sequence[ChunkPlace], rows: int, form: Form) -> tuple[Table, int]:
    """``ChunkStep.tiles`` of chunks and of the first ``rows`` tokens, and the slots they use."""
    size, columns = tile_tokens(form.group), block_columns(form.dim)
    tiles: list[tuple[int, ...]] = []
    units: list[int] = []
    for chunk in chunks:
        for start in range(0, chunk.tokens, size):
            first = chunk.position + start
            stop = min(first + size, chunk.position + chunk.tokens)
            oldest = max(0, first + 1 - form.window) if form.window else 0
            units.append(math.ceil(stop / columns) - oldest // columns)
            place = (chunk.token, chunk.position, chunk.tokens, chunk.sequence)
            tiles.append((*place, start))
    blocks = form.key_heads * blocks_per_tile(form.group)
    share = math.ceil(sum(units) * blocks / BLOCKS)
    most = max(share, MIN_COLUMNS // columns)
    split = [(start, 0, min(size, rows - start), *[0] * 5) for start in range(0, rows, size)]
    slots = 0
    for number in sorted(range(len(tiles)), key=lambda number: min(units[number], most)):
        splits = math.ceil(units[number] / most)
        split += [(*tiles[number], part, splits, slots) for part in range(splits)]
        slots += splits if splits > 1 else 0
    return np.array(split, np.int32).reshape(-1, NUMBERS), slots
