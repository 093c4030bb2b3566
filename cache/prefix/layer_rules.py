"""What the layers' kinds mean to the prefix tree: what fits it, and where a sequence can go on.

Full attention goes on anywhere, a window where its newest tokens are held without a gap, a
recurrent layer only at the end of a node that has its state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.cache.prefix.node import Node, Walk
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece


class PositionRange(NamedTuple):
    """The positions from ``first`` to ``last``, both included."""

    first: int
    last: int


class LayerRules:
    """The layers of one tree's snapshots."""

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        self.kinds = tuple(kinds)
        # A window of one token needs nothing held, and is thus none that could hinder.
        self._windows = sorted({kind.window for kind in kinds if kind.window and kind.window > 1})
        self._recurrent = any(kind.recurrent for kind in kinds)

    def check_fits(self, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Raises ValueError: the snapshot is not one of these tokens and layers."""
        if snapshot.stop != len(tokens):
            raise ValueError(f"a snapshot up to {snapshot.stop} is not one of {len(tokens)} tokens")
        if len(snapshot.layers) != len(self.kinds):
            raise ValueError(f"{len(snapshot.layers)} layers, but the tree has {len(self.kinds)}")
        for i, (kind, piece) in enumerate(zip(self.kinds, snapshot.layers, strict=True)):
            if isinstance(piece, KVPiece if kind.recurrent else StatePiece):
                raise ValueError(f"layer {i} is {kind}, but has a {type(piece).__name__}")
            held = piece.tokens if isinstance(piece, KVPiece) else 0
            full = kind.window is None and not kind.recurrent
            if full and held < snapshot.stop - snapshot.start:
                raise ValueError(
                    f"layer {i} has {held} tokens of [{snapshot.start}, {snapshot.stop})"
                )

    def windows_of(self, snapshot: Snapshot) -> tuple[int, ...]:
        """What all layers of each window hold; as it always is the newest, the fewest of any."""
        return tuple(self._window_tokens(snapshot, window) for window in self._windows)

    def _window_tokens(self, snapshot: Snapshot, window: int) -> int:
        return min(
            piece.tokens if isinstance(piece, KVPiece) else 0
            for kind, piece in zip(self.kinds, snapshot.layers, strict=True)
            if kind.window == window
        )

    def has_states(self, snapshot: Snapshot) -> bool:
        """Whether all recurrent layers have their state."""
        return all(
            isinstance(piece, StatePiece)
            for kind, piece in zip(self.kinds, snapshot.layers, strict=True)
            if kind.recurrent
        )

    def last_resumable(self, walk: Walk) -> int:
        """The last position of a walk that all layers can go on from: each has its ranges of them,
        and what one of them moves back, the others may move back further.
        """
        ranges = [_window_ranges(walk.path, i, window) for i, window in enumerate(self._windows)]
        if self._recurrent:
            ranges.append([PositionRange(node.stop, node.stop) for node in walk.path if node.state])
        position, moved = walk.length, True
        while moved:
            back = min((_last_within(layer, position) for layer in ranges), default=position)
            position, moved = back, back < position
        return position


def _window_ranges(path: Sequence[Node], index: int, window: int) -> list[PositionRange]:
    """The positions that the window's layers can go on from, given the newest of each node."""
    ranges: list[PositionRange] = []
    oldest = newest = 0  # a run of tokens held without a gap
    for node in path:
        held = node.windows[index]
        if held < node.stop - node.start:
            ranges.append(PositionRange(oldest + window - 1 if oldest else 0, newest))
            oldest = node.stop - held
        newest = node.stop
    ranges.append(PositionRange(oldest + window - 1 if oldest else 0, newest))
    return [positions for positions in ranges if positions.first <= positions.last]


def _last_within(ranges: Sequence[PositionRange], position: int) -> int:
    """The last position in the ranges up to the one given; 0, where nothing is needed, if none."""
    index = bisect_right(ranges, position, key=lambda positions: positions.first) - 1
    return min(position, ranges[index].last) if index >= 0 else 0
