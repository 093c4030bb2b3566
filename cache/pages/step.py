"""The tokens of a step, as attention over pages needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]


class ChunkPlace(NamedTuple):
    """A prompt's chunk among the tokens of a step.

    Attributes:
        token: the number of its first token in the step.
        position: the position of that token in its sequence.
        tokens: the number of its tokens.
        sequence: its row in the tables.
    """

    token: int
    position: int
    tokens: int
    sequence: int


@dataclass(slots=True)
class StepTokens:
    """The tokens of a step: one for each decode row, then those of prompt chunks.

    Attributes:
        rows: the number of decode rows; their tokens come first, in the order of the tables.
        offset: ``[tokens]`` int32, the position of each token.
        owners: ``[tokens]`` int32, each token's row in the tables.
        begins: ``[tokens]`` int32, the position of the first new token of its sequence.
        stops: ``[tokens]`` int32, the position after each token.
        chunks: the prompt chunks.
    """

    rows: int
    offset: mx.array
    owners: mx.array
    begins: mx.array
    stops: mx.array
    chunks: Sequence[ChunkPlace] = ()
    _tiles: dict[int, mx.array] = field(default_factory=dict)

    def tiles(self, size: int) -> mx.array:
        """The chunks cut into tiles of at most ``size`` tokens.

        Returns:
            ``[tiles, 5]`` int32: the four fields of ``ChunkPlace``, its ``token`` counted from the
            first chunk's, and the tile's first token in its chunk. Tiles that see the most
            tokens come last.
        """
        if size not in self._tiles:
            first = self.chunks[0].token
            tiles = [
                (chunk.token - first, chunk.position, chunk.tokens, chunk.sequence, start)
                for chunk in self.chunks
                for start in range(0, chunk.tokens, size)
            ]
            tiles.sort(key=lambda tile: tile[1] + tile[4])
            self._tiles[size] = mx.array(np.array(tiles, np.int32))
        return self._tiles[size]


@dataclass(slots=True)
class KindStep:
    """A step's arrays for the layers of one kind.

    Attributes:
        tokens: the step's tokens.
        tables: ``[sequences, pages of a sequence]`` int32, the number of each page; 0 where a
            sequence has no page.
    """

    tokens: StepTokens
    tables: mx.array
    _lengths: dict[int | None, mx.array] = field(default_factory=dict)

    def lengths(self, window: int | None) -> mx.array:
        """The number of tokens that each token sees, its own included: ``[tokens]`` int32."""
        if window not in self._lengths:
            stops = self.tokens.stops
            self._lengths[window] = stops if window is None else mx.minimum(stops, window)
        return self._lengths[window]


def step_tokens(positions: Sequence[int], chunks: Sequence[tuple[int, int]]) -> StepTokens:
    """The tokens of a step; the tables have a row for each decode row, then one for each chunk.

    Args:
        positions: the position of each decode row's token.
        chunks: position and number of tokens of each chunk.
    """
    rows = len(positions)
    offset, begins = [np.array(positions, np.int32)], [np.array(positions, np.int32)]
    owners = [np.arange(rows, dtype=np.int32)]
    places = []
    token = rows
    for sequence, (position, tokens) in enumerate(chunks, rows):
        places.append(ChunkPlace(token, position, tokens, sequence))
        offset.append(np.arange(position, position + tokens, dtype=np.int32))
        begins.append(np.full(tokens, position, np.int32))
        owners.append(np.full(tokens, sequence, np.int32))
        token += tokens
    offsets = np.concatenate(offset)
    return StepTokens(
        rows=rows,
        offset=mx.array(offsets),
        owners=mx.array(np.concatenate(owners)),
        begins=mx.array(np.concatenate(begins)),
        stops=mx.array(offsets + np.int32(1)),
        chunks=places,
    )
