"""The tokens of a step, as attention over pages needs them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.page import column_bound, doubled
from chairlift.cache.pages.page_table import PageLists, page_table
from chairlift.cache.pages.upload import Numbers, numbers_of

# Lines of the page tables for chunks and unused tokens; with more chunks, twice as many, and so on.
CHUNK_LINES = 16


class ChunkPlace(NamedTuple):
    """Several tokens of one sequence among those of a step: of a prompt, or of a row with a draft.

    Attributes:
        token: the number of its first token in the step.
        position: the position of that token in its sequence.
        tokens: the number of its tokens.
        sequence: its line in the page tables.
    """

    token: int
    position: int
    tokens: int
    sequence: int


class StepSizes(NamedTuple):
    """The numbers of a step's tokens.

    Attributes:
        tokens: all tokens, with unused ones.
        rows: the number of tokens of decode rows: one of each, or a few with a draft. They come
            first; the first lines of the page tables are theirs.
        row_limit: an upper bound of ``rows``, the same in many steps; kernels for single tokens
            compute so many. At least 1.
        chunk_limit: an upper bound of the number of prompts, and one more, the same in many steps.
        column_limit: an upper bound of the columns that a token of a row sees, the same in many
            steps.
    """

    tokens: int
    rows: int
    row_limit: int
    chunk_limit: int
    column_limit: int


class TileTable(NamedTuple):
    """A step's tokens divided into tiles for a device's kernels, for a form of layers; on the host.

    Attributes:
        table: for the kernels.
        slots: a number that decides which kernels are launched, beside the shape of ``table``.
    """

    table: Numbers
    slots: int


class Tiles(NamedTuple):
    """A ``TileTable`` on the device."""

    array: mx.array
    slots: int


# Makes the table of a step with these chunks, for a form of layers.
Tiler = Callable[[Sequence[ChunkPlace], StepSizes, Any], TileTable]


class TokenArrays(NamedTuple):
    """The numbers of a step's tokens, each ``[tokens]`` int32.

    Attributes:
        offset: the position of each token.
        owners: each token's line in the page tables.
        begins: the position of the first new token of its sequence.
        stops: the position after each token.
        row_stops: as ``stops``, but 0 for tokens of chunks and unused ones.
    """

    offset: mx.array
    owners: mx.array
    begins: mx.array
    stops: mx.array
    row_stops: mx.array


@dataclass(slots=True)
class StepTokens:
    """The tokens of a step: those of decode rows, then those of prompt chunks, then unused ones.

    Attributes:
        sizes: how many there are.
        arrays: the tokens' numbers.
        chunks: the chunks: those of prompts, and rows with several tokens that are computed as one.
        tiles: the tiles of a step with chunks, by form of layers.
    """

    sizes: StepSizes
    arrays: TokenArrays
    chunks: Sequence[ChunkPlace] = ()
    tiles: dict[Hashable, Tiles] = field(default_factory=dict)

    def with_arrays(self, arrays: TokenArrays, tiles: Mapping[Hashable, mx.array]) -> StepTokens:
        """The same step with other arrays in place of its own and of its tiles'."""
        kept = {form: Tiles(array, self.tiles[form].slots) for form, array in tiles.items()}
        return StepTokens(self.sizes, arrays, self.chunks, kept)

    def tiles_of(self, form: Hashable, tiler: Tiler) -> Tiles:
        """The tiles of a form, which are made if they were not uploaded with the step."""
        if form not in self.tiles:
            table, slots = tiler(self.chunks, self.sizes, form)
            self.tiles[form] = Tiles(mx.array(table), slots)
        return self.tiles[form]


@dataclass(slots=True)
class KindStep:
    """A step's arrays for the layers of one kind.

    Attributes:
        tokens: the step's tokens.
        pages: the ``page_table`` with a line for each token of decode rows, then for each chunk.
            With chunks there are further lines, the first of them for unused tokens.
    """

    tokens: StepTokens
    pages: mx.array
    _lengths: dict[tuple[int | None, bool], mx.array] = field(default_factory=dict)

    def lengths(self, window: int | None, rows_only: bool = False) -> mx.array:
        """The number of tokens that each token sees, its own included: ``[tokens]`` int32.

        With ``rows_only``, 0 for tokens of chunks and unused ones.
        """
        key = window, rows_only
        if key not in self._lengths:
            arrays = self.tokens.arrays
            stops = arrays.row_stops if rows_only else arrays.stops
            self._lengths[key] = stops if window is None else mx.minimum(stops, window)
        return self._lengths[key]


class StepArrays(NamedTuple):
    """The arrays of a step: those of each kind of layers, by window, and further ones."""

    kinds: dict[int | None, KindStep]
    more: list[mx.array]


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step's arrays, on the host.

    Attributes:
        sizes: how many tokens there are.
        chunks: see ``StepTokens``.
        windows: the kinds, in the order of their tables.
        slots: those of the tiles of each form, in the order of their tables.
        token_arrays: how many of ``parts`` are the tokens' numbers.
        parts: the arrays to upload: the tokens' numbers, the page tables, the tables of tiles, and
            further ones.
    """

    sizes: StepSizes
    chunks: Sequence[ChunkPlace]
    windows: Sequence[int | None]
    slots: Mapping[Hashable, int]
    token_arrays: int
    parts: Sequence[Numbers]

    def on_device(self, arrays: Sequence[mx.array]) -> StepArrays:
        """The arrays of the step.

        Args:
            arrays: those of an ``Upload`` of ``parts``.
        """
        further = iter(arrays)
        numbers = list(islice(further, self.token_arrays))
        if len(numbers) < len(TokenArrays._fields):
            numbers.append(numbers[-1])  # all tokens are alone
        tokens = StepTokens(self.sizes, TokenArrays(*numbers), self.chunks)
        kinds = {window: KindStep(tokens, next(further)) for window in self.windows}
        for form, slots in self.slots.items():
            tokens.tiles[form] = Tiles(next(further), slots)
        return StepArrays(kinds, list(further))


def step_numbers(
    rows: Sequence[tuple[int, int]],
    chunks: Sequence[tuple[int, int]],
    lists: Mapping[int | None, PageLists],
    tail: int = 0,
    row_limit: int = 0,
    min_columns: int = 0,
    alone: bool = False,
    more: Sequence[Numbers] = (),
    forms: Mapping[Hashable, Tiler] | None = None,
) -> StepNumbers:
    """The numbers of a step.

    Each token of a decode row gets a line of its own in the page tables, so that a step in which
    rows bring drafts has the shapes of one with more rows.

    Args:
        rows: position and number of tokens of each decode row.
        chunks: the same of each chunk.
        lists: for each kind, the pages of each decode row, then those of each chunk.
        tail: unused tokens behind those of the chunks. Each is the first of a sequence in page 0.
        row_limit: see ``StepSizes``; at least the tokens of the rows, at most all tokens.
        min_columns: the least ``StepSizes.column_limit``.
        alone: each token of a row reads its columns by itself; rows with several are no chunks.
        more: further arrays to upload.
        forms: forms of layers that need tiles if there are chunks, and what makes them.
    """
    sequences = numbers_of([*rows, *chunks], 2)
    positions, counts = sequences[:, 0], sequences[:, 1]
    owners = np.repeat(np.arange(len(sequences), dtype=np.int32), counts)
    begins = positions[owners]
    # The place of each token in its sequence's part of the step.
    firsts = np.cumsum(counts) - counts
    offsets = begins + (np.arange(len(owners), dtype=np.int32) - firsts[owners]).astype(np.int32)
    decoded = int(counts[: len(rows)].sum())
    places = np.concatenate([np.arange(decoded), owners[decoded:] + (decoded - len(rows))])
    numbers = [offsets, places.astype(np.int32), begins, offsets + np.int32(1)]
    copies = np.array([*counts[: len(rows)], *[1] * len(chunks)], np.int32)
    in_chunks = (firsts >= decoded) | ((counts > 1) & (not alone))
    chunk_places = np.stack([firsts, positions, counts, places[firsts]], axis=1)[in_chunks]
    own = [*map(ChunkPlace._make, chunk_places.tolist())]
    row_limit = min(max(row_limit, decoded, 1), len(owners) + tail)
    chunk_limit = doubled(CHUNK_LINES, len(chunks) + 1)
    longest = int((positions + counts)[: len(rows)].max(initial=min_columns))
    sizes = StepSizes(*(len(owners) + tail, decoded, row_limit, chunk_limit, column_bound(longest)))
    lines = decoded + len(chunks)
    tiles: dict[Hashable, TileTable] = {}
    if own or tail:
        unused = (0, lines, 0, 1)
        numbers = [
            _filled(array, sizes.tokens, number)
            for array, number in zip(numbers, unused, strict=True)
        ]
        numbers.append(numbers[-1].copy())
        numbers[-1][: len(owners)][counts[owners] != 1] = 0
        numbers[-1][decoded:] = 0
        lines = row_limit + chunk_limit
        tiles = {form: tiler(own, sizes, form) for form, tiler in (forms or {}).items()}
    tables = [
        page_table(PageLists(np.repeat(starts, copies), pages), lines)
        for starts, pages in lists.values()
    ]
    slots = {form: tile.slots for form, tile in tiles.items()}
    parts = [*numbers, *tables, *(tile.table for tile in tiles.values()), *more]
    return StepNumbers(sizes, own, [*lists], slots, len(numbers), parts)


def _filled(array: Numbers, length: int, number: int) -> Numbers:
    """An array that is extended to ``length`` by a number."""
    result = np.full(length, number, array.dtype)
    result[: len(array)] = array
    return result
