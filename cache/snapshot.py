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
from dataclasses import dataclass, field

import mlx.core as mx


def _own(array: mx.array) -> mx.array:
    """The same bytes in a buffer that is not kept alive for anything else, once evaluated.

    NOTE: ``array * 1`` would flush denormals on Metal and turn booleans into integers. An array
    that has its buffer (nearly) to itself is shared rather than copied: MLX allows 16 KiB of slack.
    """
    return mx.contiguous(array)


@dataclass(frozen=True, slots=True)
class KVPiece:
    """Keys and values ``[1, heads, tokens, dim]`` (their dims may differ), oldest token first.

    Raises:
        ValueError: the arrays are not of rank 4, or differ in their tokens.
    """

    keys: mx.array
    values: mx.array

    def __post_init__(self) -> None:
        keys, values = self.keys.shape, self.values.shape
        if len(keys) != 4 or len(values) != 4 or keys[2] != values[2]:
            raise ValueError(f"keys {keys} and values {values} are not [1, heads, tokens, dim]")

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
        if (start, stop) == (0, self.tokens):
            return self
        return KVPiece(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def newest(self, tokens: int) -> KVPiece:
        """At most the last ``tokens`` of those held, sharing memory."""
        return self.part(max(0, self.tokens - tokens), self.tokens)

    def copy(self) -> KVPiece:
        """The same, keeping no bigger array alive, once evaluated."""
        return KVPiece(_own(self.keys), _own(self.values))


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
        """The same, keeping no bigger array alive, once evaluated."""
        return StatePiece(tuple(None if slot is None else _own(slot) for slot in self.slots))


LayerState = KVPiece | StatePiece


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer keeps: ``window`` newest tokens (None: all), or a recurrent state.

    ``slots`` is how many arrays a recurrent layer has, as far as that is known. ``chunked``: a
    query sees nothing before the last multiple of ``window``; as much is kept as of a window, which
    is never too little.
    """

    window: int | None = None
    recurrent: bool = False
    slots: int = field(default=0, compare=False)
    chunked: bool = False

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
    layers: tuple[LayerState | None, ...]

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
        """The same, keeping no bigger array alive, once evaluated."""
        layers = tuple(None if piece is None else piece.copy() for piece in self.layers)
        return Snapshot(self.start, self.stop, layers)

    def part(self, start: int, stop: int) -> Snapshot:
        """What is held of ``[start, stop)``, sharing memory: states only where this one ends.

        Raises:
            ValueError: the range is not one inside this one's.
        """
        if not self.start <= start <= stop <= self.stop:
            raise ValueError(f"[{start}, {stop}) is not within [{self.start}, {self.stop})")
        if (start, stop) == (self.start, self.stop):
            return self
        layers = tuple(self._part_of(piece, start, stop) for piece in self.layers)
        return Snapshot(start, stop, layers)

    def _part_of(self, piece: LayerState | None, start: int, stop: int) -> LayerState | None:
        if not isinstance(piece, KVPiece):
            return piece if stop == self.stop else None
        oldest = self.stop - piece.tokens
        start = max(start, oldest)
        return piece.part(start - oldest, stop - oldest) if start < stop else None

    def split(self, at: int) -> tuple[Snapshot, Snapshot]:
        """``[start, at)`` and ``[at, stop)``, neither keeping the other alive once evaluated.

        The later one keeps what cannot be split (recurrent states); the earlier one keeps what is
        left of each window. Whether it is enough to go on from, ``resumable`` tells. At a border
        one of the two covers nothing and the other is this one.

        Raises:
            ValueError: ``at`` lies outside.
        """
        if not self.start <= at <= self.stop:
            raise ValueError(f"cannot split [{self.start}, {self.stop}) at {at}")
        nothing = Snapshot(at, at, (None,) * len(self.layers))
        if at == self.start:
            return nothing, self
        if at == self.stop:
            return self, nothing
        return self.part(self.start, at).copy(), self.part(at, self.stop).copy()

    def filled(self, other: Snapshot) -> Snapshot:
        """This one, with copies of what ``other`` holds of it besides; itself if that is nothing.

        Raises:
            ValueError: ``other`` reaches further back, or does not end where this one does.
        """
        if other.stop != self.stop or other.start < self.start:
            raise ValueError(f"[{other.start}, {other.stop}) is no end of ..{self.stop})")
        layers = tuple(map(_richer, self.layers, other.layers))
        if all(new is old for new, old in zip(layers, self.layers, strict=True)):
            return self
        return Snapshot(self.start, self.stop, layers)


def _richer(mine: LayerState | None, other: LayerState | None) -> LayerState | None:
    more = mine is None
    if isinstance(mine, KVPiece) and isinstance(other, KVPiece):
        more = other.tokens > mine.tokens
    return other.copy() if more and other is not None else mine


def resumable(kinds: Sequence[LayerKind], path: Sequence[Snapshot]) -> bool:
    """Whether a sequence can go on from the end of ``path``: snapshots of ``[0, a), [a, b), ...``.

    Raises:
        ValueError: the snapshots do not follow each other.
    """
    _check_unbroken(path)
    stop = path[-1].stop if path else 0
    for i, kind in enumerate(kinds):
        if kind.recurrent and stop and _state(path, i) is None:
            return False
        needed = kind.needed(stop)
        if sum(piece.tokens for piece in _newest(path, i, needed)) < needed:
            return False
    return True


def merged(kinds: Sequence[LayerKind], path: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of all of ``path``, which must be unbroken; later states replace earlier ones.

    A window's piece is no longer than it has to be. Arrays may be shared with ``path``'s.

    Raises:
        ValueError: the snapshots do not follow each other.
    """
    if not path:
        return Snapshot(0, 0, (None,) * len(kinds))
    _check_unbroken(path)
    stop = path[-1].stop
    layers: list[LayerState | None] = []
    for i, kind in enumerate(kinds):
        if kind.recurrent:
            layers.append(_state(path, i))
        else:
            layers.append(_joined(_newest(path, i, kind.needed(stop))))
    return Snapshot(path[0].start, stop, tuple(layers))


def _check_unbroken(path: Sequence[Snapshot]) -> None:
    for before, after in itertools.pairwise(path):
        if before.stop != after.start:
            raise ValueError(f"[.., {before.stop}) is not followed by [{after.start}, ..)")


def _state(path: Sequence[Snapshot], layer: int) -> StatePiece | None:
    """The state at the end of the path, which may end with snapshots of no tokens."""
    for snapshot in reversed(path):
        piece = snapshot.layers[layer]
        if isinstance(piece, StatePiece):
            return piece
        if snapshot.stop > snapshot.start:
            break
    return None


def _newest(path: Sequence[Snapshot], layer: int, tokens: int) -> list[KVPiece]:
    """The end of an unbroken run of a layer's tokens, at most ``tokens`` of them, oldest first."""
    pieces: list[KVPiece] = []
    for snapshot in reversed(path):
        piece = snapshot.layers[layer]
        held = piece.tokens if isinstance(piece, KVPiece) else 0
        if isinstance(piece, KVPiece) and min(held, tokens) > 0:
            pieces.append(piece.newest(tokens))
            tokens -= held
        if tokens <= 0 or held < snapshot.stop - snapshot.start:
            break
    return pieces[::-1]


def _joined(pieces: Sequence[KVPiece]) -> KVPiece | None:
    if len(pieces) <= 1:
        return pieces[0] if pieces else None
    return KVPiece(
        mx.concatenate([piece.keys for piece in pieces], axis=2),
        mx.concatenate([piece.values for piece in pieces], axis=2),
    )
