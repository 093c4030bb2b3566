"""What caches hold of one sequence, in memory of its own: to keep, split, merge and put back.

A ``Snapshot`` covers the tokens ``[start, stop)`` of a sequence, layer by layer:

- an attention layer's ``KVPiece`` holds the keys and values of the newest of them. Full attention
  always has all; a sliding window that has wrapped has only those that it still kept;
- a recurrent layer's ``StatePiece`` is the state after token ``stop``, or None where nobody kept
  it. There is no way back from it, and no part of it.

So a snapshot splits where all its layers can, and a sequence can go on from a position only if
every layer has what it needs there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KVPiece:
    """Keys and values ``[1, heads, tokens, dim]`` (their dims may differ), oldest token first."""

    keys: mx.array
    values: mx.array

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return int(self.keys.shape[2])

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Both."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.keys.nbytes + self.values.nbytes)

    def part(self, start: int, stop: int) -> KVPiece:
        """Tokens ``[start, stop)`` of those held, sharing memory."""
        return KVPiece(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def newest(self, tokens: int) -> KVPiece:
        """At most the last ``tokens`` of those held, sharing memory."""
        return self if self.tokens <= tokens else self.part(self.tokens - tokens, self.tokens)

    def copy(self) -> KVPiece:
        """The same in memory of its own, once evaluated."""
        return KVPiece(self.keys * 1, self.values * 1)


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A recurrent layer's state, ``[1, ...]`` each; a slot that was never written is None."""

    slots: tuple[mx.array | None, ...]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The slots that there are."""
        return tuple(slot for slot in self.slots if slot is not None)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(int(array.nbytes) for array in self.arrays)

    def copy(self) -> StatePiece:
        """The same in memory of its own, once evaluated."""
        return StatePiece(tuple(None if slot is None else slot * 1 for slot in self.slots))


Piece = KVPiece | StatePiece


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer keeps: ``window`` newest tokens (None: all), or a recurrent state."""

    window: int | None = None
    recurrent: bool = False

    def needed(self, position: int) -> int:
        """Tokens of KV that going on from ``position`` takes: a new query sees itself as well."""
        if self.recurrent:
            return 0
        return position if self.window is None else min(position, self.window - 1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tokens ``[start, stop)``; a layer is None where it holds nothing of them.

    Raises:
        ValueError: the range is not one, or a layer holds more tokens than it has.
    """

    start: int
    stop: int
    layers: tuple[Piece | None, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a snapshot cannot cover [{self.start}, {self.stop})")
        most = max((p.tokens for p in self.layers if isinstance(p, KVPiece)), default=0)
        if most > self.stop - self.start:
            raise ValueError(f"{most} tokens held, but [{self.start}, {self.stop}) covered")

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(piece.nbytes for piece in self.layers if piece is not None)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, to evaluate."""
        return [array for piece in self.layers if piece is not None for array in piece.arrays]

    def copy(self) -> Snapshot:
        """The same in memory of its own, once evaluated."""
        layers = tuple(None if piece is None else piece.copy() for piece in self.layers)
        return Snapshot(self.start, self.stop, layers)

    def split(self, at: int) -> tuple[Snapshot, Snapshot]:
        """``[start, at)`` and ``[at, stop)``, each in memory of its own once evaluated.

        The later one keeps what cannot be split (recurrent states); the earlier one keeps what is
        left of each window. Whether it is enough to go on from, ``resumable`` tells.

        Raises:
            ValueError: ``at`` lies outside.
        """
        if not self.start <= at <= self.stop:
            raise ValueError(f"cannot split [{self.start}, {self.stop}) at {at}")
        if at == self.start:
            return Snapshot(at, at, (None,) * len(self.layers)), self
        if at == self.stop:
            return self, Snapshot(at, at, (None,) * len(self.layers))
        before: list[Piece | None] = []
        after: list[Piece | None] = []
        for piece in self.layers:
            if isinstance(piece, KVPiece):
                cut = piece.tokens - min(piece.tokens, self.stop - at)
                before.append(piece.part(0, cut).copy() if cut else None)
                after.append(piece.part(cut, piece.tokens).copy() if cut < piece.tokens else None)
            else:
                before.append(None)
                after.append(piece)
        return Snapshot(self.start, at, tuple(before)), Snapshot(at, self.stop, tuple(after))


def resumable(kinds: Sequence[LayerKind], path: Sequence[Snapshot]) -> bool:
    """Whether a sequence can go on from the end of ``path``: ``[0, a), [a, b), ...``."""
    if not path:
        return True
    stop = path[-1].stop
    return all(_held(kind, path, i) >= kind.needed(stop) for i, kind in enumerate(kinds)) and all(
        isinstance(path[-1].layers[i], StatePiece)
        for i, kind in enumerate(kinds)
        if kind.recurrent and stop
    )


def merged(kinds: Sequence[LayerKind], path: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of all of ``path``, which must be unbroken; later states replace earlier ones.

    A window's piece is no longer than it has to be. Arrays may be shared with ``path``'s.

    Raises:
        ValueError: the snapshots do not follow each other.
    """
    if not path:
        return Snapshot(0, 0, (None,) * len(kinds))
    for before, after in itertools.pairwise(path):
        if before.stop != after.start:
            raise ValueError(f"[.., {before.stop}) is not followed by [{after.start}, ..)")
    layers: list[Piece | None] = []
    for i, kind in enumerate(kinds):
        if kind.recurrent:
            layers.append(path[-1].layers[i])
            continue
        pieces = _newest(path, i, kind.needed(path[-1].stop))
        layers.append(_joined(pieces) if pieces else None)
    return Snapshot(path[0].start, path[-1].stop, tuple(layers))


def _held(kind: LayerKind, path: Sequence[Snapshot], layer: int) -> int:
    if kind.recurrent:
        return 0
    return sum(piece.tokens for piece in _newest(path, layer, kind.needed(path[-1].stop)))


def _newest(path: Sequence[Snapshot], layer: int, tokens: int) -> list[KVPiece]:
    """The end of an unbroken run of a layer's tokens, at most ``tokens`` of them, oldest first."""
    pieces: list[KVPiece] = []
    for snapshot in reversed(path):
        piece = snapshot.layers[layer]
        if tokens <= 0 or not isinstance(piece, KVPiece):
            if snapshot.stop > snapshot.start:
                break
            continue
        pieces.insert(0, piece.newest(tokens))
        tokens -= piece.tokens
        if piece.tokens < snapshot.stop - snapshot.start:
            break
    return pieces


def _joined(pieces: Sequence[KVPiece]) -> KVPiece:
    if len(pieces) == 1:
        return pieces[0]
    return KVPiece(
        mx.concatenate([piece.keys for piece in pieces], axis=2),
        mx.concatenate([piece.values for piece in pieces], axis=2),
    )
