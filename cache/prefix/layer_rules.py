"""Rules of the layers' kinds: which snapshots fit the tree, and where a sequence can resume.

Full attention can resume anywhere, a window where its newest tokens are stored without a gap, a
recurrent layer only at the end of a node that has its state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.cache.prefix.node import Node, Walk
from chairlift.cache.snapshot import AttentionPiece, LayerKind, Snapshot, StatePiece


class PositionRange(NamedTuple):
    """The positions from ``first`` to ``last``, both included."""

    first: int
    last: int


class LayerRules:
    """The rules for one tree, given the kinds of its layers."""

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        self.kinds = tuple(kinds)
        # A window of one token needs no cached token, so it never restricts where to resume.
        self._windows = sorted({kind.window for kind in kinds if kind.window and kind.window > 1})
        self._recurrent = any(kind.recurrent for kind in kinds)

    def check_fits(self, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Raises ValueError if the snapshot does not fit these tokens and layers."""
        if snapshot.stop != len(tokens):
            raise ValueError(f"a snapshot up to {snapshot.stop} is not one of {len(tokens)} tokens")
        if len(snapshot.layers) != len(self.kinds):
            raise ValueError(f"{len(snapshot.layers)} layers, but the tree has {len(self.kinds)}")
        for i, (kind, piece) in enumerate(zip(self.kinds, snapshot.layers, strict=True)):
            if isinstance(piece, AttentionPiece if kind.recurrent else StatePiece):
                raise ValueError(f"layer {i} is {kind}, but has a {type(piece).__name__}")
            cached = piece.tokens if isinstance(piece, AttentionPiece) else 0
            full = kind.window is None and not kind.recurrent
            if full and cached < snapshot.stop - snapshot.start:
                raise ValueError(
                    f"layer {i} has {cached} tokens of [{snapshot.start}, {snapshot.stop})"
                )

    def windows_of(self, snapshot: Snapshot) -> tuple[int, ...]:
        """For each window, the number of newest tokens that all its layers have."""
        return tuple(self._window_tokens(snapshot, window) for window in self._windows)

    def _window_tokens(self, snapshot: Snapshot, window: int) -> int:
        return min(
            piece.tokens if isinstance(piece, AttentionPiece) else 0
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
        """The last position of a walk from which all layers can resume.

        Each layer has ranges of such positions. A layer that moves the position back may make
        another layer move it back further, so this iterates until no layer does.
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
    """The positions from which a window's layers can resume, given each node's newest tokens."""
    ranges: list[PositionRange] = []
    oldest = newest = 0  # the current run of stored tokens without a gap
    for node in path:
        stored = node.windows[index]
        if stored < node.stop - node.start:
            ranges.append(PositionRange(oldest + window - 1 if oldest else 0, newest))
            oldest = node.stop - stored
        newest = node.stop
    ranges.append(PositionRange(oldest + window - 1 if oldest else 0, newest))
    return [positions for positions in ranges if positions.first <= positions.last]


def _last_within(ranges: Sequence[PositionRange], position: int) -> int:
    """The last position in the ranges that is at most ``position``; 0 if there is none."""
    index = bisect_right(ranges, position, key=lambda positions: positions.first) - 1
    return min(position, ranges[index].last) if index >= 0 else 0
