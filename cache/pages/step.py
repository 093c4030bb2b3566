"""The tokens of a step, as attention over pages needs them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]


_ZERO = mx.array(0, mx.int32)


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
            first; the first rows of the tables are theirs.
        offset: ``[tokens]`` int32, the position of each token.
        owners: ``[tokens]`` int32, each token's row in the tables.
        begins: ``[tokens]`` int32, the position of the first new token of its sequence.
        stops: ``[tokens]`` int32, the position after each token.
        chunks: the prompt chunks; unused tokens may follow them.
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
        tables: ``[tokens of decode rows and chunks, pages of a sequence]`` int32, the number of
            each page; 0 where a sequence has no page. A last line without pages is that of unused
            tokens behind the chunks, if there are any.
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


def step_kinds(
    rows: Sequence[tuple[int, int]],
    chunks: Sequence[tuple[int, int]],
    tables: Mapping[int | None, Table],
    tail: int = 0,
) -> dict[int | None, KindStep]:
    """The arrays of a step, by the kinds' windows.

    Each token of a decode row gets a row of the tables of its own, so that a step in which rows
    bring drafts has the shapes of one with more rows.

    Args:
        rows: position and number of tokens of each decode row.
        chunks: the same of each chunk.
        tables: for each kind, a row for each decode row, then one for each chunk.
        tail: unused tokens behind the chunks.
    """
    sequences = np.array([*rows, *chunks], np.int32).reshape(-1, 2)
    positions, counts = sequences[:, 0], sequences[:, 1]
    owners = np.repeat(np.arange(len(sequences), dtype=np.int32), counts)
    begins = positions[owners]
    # The place of each token in its sequence's part of the step.
    firsts = np.cumsum(counts) - counts
    offsets = begins + (np.arange(len(owners), dtype=np.int32) - firsts[owners]).astype(np.int32)
    decoded = sum(count for _, count in rows)
    copies = np.array([*(count for _, count in rows), *[1] * len(chunks)], np.int32)
    lines = np.concatenate([np.arange(decoded), owners[decoded:] + (decoded - len(rows))])
    if tail:
        # Each is the first token of a sequence in page 0.
        offsets, begins = np.pad(offsets, (0, tail)), np.pad(begins, (0, tail))
        lines = np.pad(lines, (0, tail), constant_values=len(chunks) + decoded)
    offset, owner, begin, stop, *uploaded = _uploaded(
        [
            *(offsets, lines.astype(np.int32), begins, offsets + np.int32(1)),
            *(_lines_of(table, copies, tail) for table in tables.values()),
        ]
    )
    places = [
        ChunkPlace(int(firsts[len(rows) + i]), position, count, decoded + i)
        for i, (position, count) in enumerate(chunks)
    ]
    tokens = StepTokens(decoded, offset, owner, begin, stop, places)
    return {w: KindStep(tokens, table) for w, table in zip(tables, uploaded, strict=True)}


def _lines_of(table: Table, copies: Table, tail: int) -> Table:
    """A line for each token of a row and for each chunk, and one for unused tokens."""
    lines = np.repeat(table, copies, axis=0)
    return np.pad(lines, ((0, 1), (0, 0))) if tail else lines


def _uploaded(parts: Sequence[Table]) -> list[mx.array]:
    """Copies arrays to the device's own memory, all with one operation.

    The CPU writes arrays in memory that both share; GPUs would read each of them there.
    """
    whole = mx.array(np.concatenate([part.ravel() for part in parts])) + _ZERO
    ends = np.cumsum([part.size for part in parts]).tolist()
    return [
        whole[end - part.size : end].reshape(part.shape)
        for part, end in zip(parts, ends, strict=True)
    ]
