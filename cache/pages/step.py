"""The tokens of a step, as attention over pages needs them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
    """The tokens of a step: those of decode rows, then those of prompt chunks.

    Attributes:
        rows: the number of tokens of decode rows: one of each, or a few with a draft. They come
            first, in the order of the tables.
        offset: ``[tokens]`` int32, the position of each token.
        owners: ``[tokens]`` int32, each token's row in the tables.
        begins: ``[tokens]`` int32, the position of the first new token of its sequence.
        stops: ``[tokens]`` int32, the position after each token.
        chunks: the prompt chunks.
        tiles: what a device's kernels make of the chunks, for each form of layers.
    """

    rows: int
    offset: mx.array
    owners: mx.array
    begins: mx.array
    stops: mx.array
    chunks: Sequence[ChunkPlace] = ()
    tiles: dict[Hashable, tuple[mx.array, int]] = field(default_factory=dict)


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


def step_tokens(rows: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, int]]) -> StepTokens:
    """The tokens of a step; the tables have a row for each decode row, then one for each chunk.

    Args:
        rows: position and number of tokens of each decode row.
        chunks: the same of each chunk.
    """
    sequences = np.array([*rows, *chunks], np.int32).reshape(-1, 2)
    positions, counts = sequences[:, 0], sequences[:, 1]
    owners = np.repeat(np.arange(len(sequences), dtype=np.int32), counts)
    begins = positions[owners]
    # The place of each token in its sequence's part of the step.
    firsts = np.cumsum(counts) - counts
    offsets = begins + (np.arange(len(owners), dtype=np.int32) - firsts[owners]).astype(np.int32)
    return StepTokens(
        rows=sum(count for _, count in rows),
        offset=mx.array(offsets),
        owners=mx.array(owners),
        begins=mx.array(begins),
        stops=mx.array(offsets + np.int32(1)),
        chunks=[
            ChunkPlace(int(firsts[sequence]), position, count, sequence)
            for sequence, (position, count) in enumerate(chunks, len(rows))
        ],
    )
