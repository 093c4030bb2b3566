"""Cuts the tokens of a step with chunks into tiles, which ``chunk_attention`` computes in blocks.

The number of tiles, and that of their slots, depend on the step's size alone: tiles of zeros fill
them up, whose blocks end at once. So launches recur, and a step can be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chairlift.cache.pages.step import ChunkPlace, StepSizes, TileTable
from chairlift.cache.pages.upload import Numbers, numbers_of
from chairlift.engine.cuda.paged.chunk_attention import (
    SHORT,
    block_columns,
    blocks_per_tile,
    tile_rows,
    tile_tokens,
)

# The columns of short tiles are split if there are fewer blocks than this, about four for each
# processor of a large GPU, or if a tile has much more than its share of all columns. Of tall tiles,
# half as many blocks have as many rows.
BLOCKS = 528
# The least columns of a split: merging takes as long as a few hundred columns.
MIN_COLUMNS = 512
# Numbers of a tile; see ``ChunkStep``.
NUMBERS = 8


class Form(NamedTuple):
    """The properties of a layer that determine its tiles; layers of the same form share them.

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


class Tiling(NamedTuple):
    """The size of a step's tiles, for a form of layers.

    Attributes:
        form: of the layers.
        rows: of a tile, see ``chunk_attention.tile_rows``.
    """

    form: Form
    rows: int

    @property
    def tokens(self) -> int:
        """The tokens of a tile."""
        return tile_tokens(self.form.group, self.rows)

    @property
    def blocks(self) -> int:
        """The blocks that compute a tile."""
        return self.form.key_heads * blocks_per_tile(self.form.group)

    @property
    def most_blocks(self) -> int:
        """Up to so many blocks, columns are split."""
        return BLOCKS * SHORT // self.rows


def tiling_of(form: Form, sizes: StepSizes) -> Tiling:
    """The tiling of a step of these sizes."""
    return Tiling(form, tile_rows(form.dim, sizes.tokens - sizes.row_limit))


def tile_table(chunks: Sequence[ChunkPlace], sizes: StepSizes, form: Form) -> TileTable:
    """The tiles of a step's chunks and of its tokens of rows."""
    tiling = tiling_of(form, sizes)
    found, slots = chunk_tiles(chunks, sizes.rows, tiling)
    limits = tile_limits(sizes.tokens, sizes.row_limit, sizes.chunk_limit, tiling)
    assert len(found) <= limits.tiles, (len(found), limits)
    assert slots <= limits.slots, (slots, limits)
    table = np.zeros((limits.tiles, NUMBERS), np.int32)
    table[limits.tiles - len(found) :] = found
    return TileTable(table, limits.slots)


class TileLimits(NamedTuple):
    """Upper bounds of the number of tiles, with each split counted, and of their slots."""

    tiles: int
    slots: int


def tile_limits(tokens: int, row_limit: int, chunk_limit: int, tiling: Tiling) -> TileLimits:
    """The limits of all steps of a size; see ``StepSizes``.

    The last tile of each chunk may not be full, nor that of the single tokens. Splits add at most
    ``most_blocks`` to all tiles together, and a tile that is split has less than twice its share
    of these.
    """
    more = tiling.most_blocks // tiling.blocks + 1
    begun = chunk_limit + row_limit // 2 + row_limit // tiling.tokens + 1
    return TileLimits(tokens // tiling.tokens + begun + more, 2 * more)


def chunk_tiles(chunks: Sequence[ChunkPlace], rows: int, tiling: Tiling) -> tuple[Numbers, int]:
    """``ChunkStep.tiles`` of chunks and of the first ``rows`` tokens, and the slots they use."""
    form, size, columns = tiling.form, tiling.tokens, block_columns(tiling.form.dim)
    places = numbers_of(chunks, 4)
    counts = -(-places[:, 2] // size)
    owners = np.repeat(places, counts, axis=0)
    starts = size * (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts))
    firsts = owners[:, 1] + starts
    stops = np.minimum(firsts + size, owners[:, 1] + owners[:, 2])
    oldest = np.maximum(0, firsts + 1 - form.window) if form.window else 0
    units = -(-stops // columns) - oldest // columns
    share = -(-units.sum() * tiling.blocks // tiling.most_blocks)
    most = max(int(share), MIN_COLUMNS // columns)
    order = np.argsort(np.minimum(units, most), kind="stable")
    splits = -(-units[order] // most)
    slots = np.where(splits > 1, splits, 0)
    whole = np.column_stack([owners[order], starts[order], splits, np.cumsum(slots) - slots])
    each = np.repeat(whole, splits, axis=0)
    parts = np.arange(len(each)) - np.repeat(np.cumsum(splits) - splits, splits)
    # The slots of tiles that are not split are never used.
    split = np.column_stack([each[:, :5], parts, each[:, 5:]])
    copied = np.zeros((-(-rows // size), NUMBERS), np.int32)
    copied[:, 0] = np.arange(0, rows, size)
    copied[:, 2] = np.minimum(size, rows - copied[:, 0])
    return np.concatenate([copied, split]).astype(np.int32), int(slots.sum())
