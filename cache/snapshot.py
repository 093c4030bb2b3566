"""One sequence's cached state outside a batch: stored, split, merged and restored.

A ``Snapshot`` covers the tokens ``[start, stop)`` of a sequence, layer by layer:

- an attention layer's ``KVPiece`` has the keys and values of the newest of these tokens. Full
  attention always has all; a sliding window that has wrapped has only those still in the window;
- a recurrent layer's ``StatePiece`` is the state after token ``stop``, or None if it was not
  stored. A state can be neither rewound nor split.

So a snapshot splits where all its layers can, and a sequence can resume from a position only if
every layer has the tokens or the state that it needs there.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx


def _compact(array: mx.array) -> mx.array:
    """A bit-exact copy that, once evaluated, keeps no larger buffer alive.

    NOTE: ``array * 1`` would flush denormals on Metal and turn booleans into integers. An array
    that (nearly) fills its buffer is shared rather than copied: MLX allows 16 KiB of slack.
    """
    return mx.contiguous(array)


class AttentionPiece(ABC):
    """The newest tokens that a snapshot has of an attention layer."""

    __slots__ = ()

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of tokens."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays to evaluate; none if the tokens are in a batch's buffers."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the tokens."""

    @abstractmethod
    def part(self, start: int, stop: int) -> AttentionPiece:
        """Tokens ``[start, stop)`` of this piece, sharing memory."""

    @abstractmethod
    def copy(self) -> AttentionPiece:
        """A piece that, once evaluated, keeps no more memory than its own."""

    @abstractmethod
    def loaded(self) -> KVPiece:
        """The tokens as arrays of their own."""

    def newest(self, tokens: int) -> AttentionPiece:
        """At most the last ``tokens`` tokens, sharing memory."""
        return self.part(max(0, self.tokens - tokens), self.tokens)

    def followed_by(self, later: Sequence[AttentionPiece]) -> AttentionPiece | None:
        """This piece and those after it as one that shares memory; None if that is impossible."""
        return None if later else self


@dataclass(frozen=True, slots=True)
class KVPiece(AttentionPiece):
    """Keys and values ``[1, heads, tokens, dim]`` (their dims may differ), oldest token first.

    Raises:
        ValueError: the arrays are not of rank 4, or have different numbers of tokens.
    """

    keys: mx.array
    values: mx.array

    def __post_init__(self) -> None:
        keys, values = self.keys.shape, self.values.shape
        if len(keys) != 4 or len(values) != 4 or keys[2] != values[2]:
            raise ValueError(f"keys {keys} and values {values} are not [1, heads, tokens, dim]")

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.keys.shape[2])

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Keys and values."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.keys.nbytes + self.values.nbytes)

    def part(self, start: int, stop: int) -> KVPiece:
        """Tokens ``[start, stop)`` of this piece, sharing memory."""
        if (start, stop) == (0, self.tokens):
            return self
        return KVPiece(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def copy(self) -> KVPiece:
        """A copy that, once evaluated, keeps no larger array alive."""
        return KVPiece(_compact(self.keys), _compact(self.values))

    def loaded(self) -> KVPiece:
        """This piece."""
        return self


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A recurrent layer's state, one array ``[1, ...]`` per slot; None if never written."""

    slots: tuple[mx.array | None, ...]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The slots that were written."""
        return tuple(slot for slot in self.slots if slot is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(int(array.nbytes) for array in self.arrays)

    def copy(self) -> StatePiece:
        """A copy that, once evaluated, keeps no larger array alive."""
        return StatePiece(tuple(None if slot is None else _compact(slot) for slot in self.slots))


LayerState = AttentionPiece | StatePiece


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The kind of a layer's cache: the newest tokens of a window, all tokens, or a recurrent state.

    Attributes:
        window: tokens of the window; None: all tokens.
        recurrent: whether the layer has a recurrent state instead of keys and values.
        slots: number of arrays of a recurrent layer, if known.
        chunked: whether a query sees nothing before the last multiple of ``window``. The layer
            caches as much as a window layer, which is always enough.
    """

    window: int | None = None
    recurrent: bool = False
    slots: int = field(default=0, compare=False)
    chunked: bool = False

    def needed(self, position: int) -> int:
        """Cached tokens needed to resume from ``position``; a new query also sees itself."""
        if self.recurrent:
            return 0
        return position if self.window is None else min(position, self.window - 1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tokens ``[start, stop)`` of a sequence; a layer without any of their state is None.

    Raises:
        ValueError: the range is invalid, or a layer has more tokens than the range.
    """

    start: int
    stop: int
    layers: tuple[LayerState | None, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a snapshot cannot cover [{self.start}, {self.stop})")
        longest = max((p.tokens for p in self.layers if isinstance(p, AttentionPiece)), default=0)
        if longest > self.stop - self.start:
            raise ValueError(f"{longest} tokens held, but [{self.start}, {self.stop}) covered")

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(piece.nbytes for piece in self.layers if piece is not None)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for evaluation."""
        return [array for piece in self.layers if piece is not None for array in piece.arrays]

    def copy(self) -> Snapshot:
        """A copy that, once evaluated, keeps no larger array alive."""
        layers = tuple(None if piece is None else piece.copy() for piece in self.layers)
        return Snapshot(self.start, self.stop, layers)

    def loaded(self) -> Snapshot:
        """This state in arrays of its own, which no batch's buffers have to keep."""
        layers = tuple(
            piece.loaded() if isinstance(piece, AttentionPiece) else piece for piece in self.layers
        )
        return Snapshot(self.start, self.stop, layers)

    def part(self, start: int, stop: int) -> Snapshot:
        """The part for ``[start, stop)``, sharing memory; it has states only at this one's end.

        Raises:
            ValueError: the range is invalid or not inside this one's.
        """
        if not self.start <= start <= stop <= self.stop:
            raise ValueError(f"[{start}, {stop}) is not within [{self.start}, {self.stop})")
        if (start, stop) == (self.start, self.stop):
            return self
        layers = tuple(self._part_of(piece, start, stop) for piece in self.layers)
        return Snapshot(start, stop, layers)

    def _part_of(self, piece: LayerState | None, start: int, stop: int) -> LayerState | None:
        if not isinstance(piece, AttentionPiece):
            return piece if stop == self.stop else None
        oldest = self.stop - piece.tokens
        start = max(start, oldest)
        return piece.part(start - oldest, stop - oldest) if start < stop else None

    def split(self, at: int) -> tuple[Snapshot, Snapshot]:
        """``[start, at)`` and ``[at, stop)``; once evaluated, neither keeps the other alive.

        The later part gets the recurrent states; the earlier part gets what remains of each window,
        and ``resumable`` tells whether a sequence can resume from it. At a border, one part is
        empty and the other is this snapshot.

        Raises:
            ValueError: ``at`` lies outside.
        """
        if not self.start <= at <= self.stop:
            raise ValueError(f"cannot split [{self.start}, {self.stop}) at {at}")
        empty = Snapshot(at, at, (None,) * len(self.layers))
        if at == self.start:
            return empty, self
        if at == self.stop:
            return self, empty
        return self.part(self.start, at).copy(), self.part(at, self.stop).copy()

    def filled(self, other: Snapshot) -> Snapshot:
        """This snapshot, completed with copies of what only ``other`` has.

        Returns:
            This same object if ``other`` has nothing more.

        Raises:
            ValueError: ``other`` begins earlier, or does not end where this one does.
        """
        if other.stop != self.stop or other.start < self.start:
            raise ValueError(f"[{other.start}, {other.stop}) is no end of ..{self.stop})")
        layers = tuple(map(_richer, self.layers, other.layers))
        if all(new is old for new, old in zip(layers, self.layers, strict=True)):
            return self
        return Snapshot(self.start, self.stop, layers)


def _richer(mine: LayerState | None, other: LayerState | None) -> LayerState | None:
    more = mine is None
    if isinstance(mine, AttentionPiece) and isinstance(other, AttentionPiece):
        more = other.tokens > mine.tokens
    return other.copy() if more and other is not None else mine


def resumable(kinds: Sequence[LayerKind], path: Sequence[Snapshot]) -> bool:
    """Whether a sequence can resume from the end of ``path``: snapshots of ``[0, a), [a, b), ...``.

    Raises:
        ValueError: the snapshots are not consecutive.
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
    """One snapshot of all of ``path``; later states replace earlier ones.

    A window's piece is as short as resuming permits. Arrays may be shared with ``path``'s.

    Raises:
        ValueError: the snapshots are not consecutive.
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
    """The state at the end of the path, which may end with empty snapshots."""
    for snapshot in reversed(path):
        piece = snapshot.layers[layer]
        if isinstance(piece, StatePiece):
            return piece
        if snapshot.stop > snapshot.start:
            break
    return None


def _newest(path: Sequence[Snapshot], layer: int, tokens: int) -> list[AttentionPiece]:
    """A layer's newest consecutive tokens, at most ``tokens`` of them, oldest first."""
    pieces: list[AttentionPiece] = []
    for snapshot in reversed(path):
        piece = snapshot.layers[layer]
        cached = piece.tokens if isinstance(piece, AttentionPiece) else 0
        if isinstance(piece, AttentionPiece) and min(cached, tokens) > 0:
            pieces.append(piece.newest(tokens))
            tokens -= cached
        if tokens <= 0 or cached < snapshot.stop - snapshot.start:
            break
    return pieces[::-1]


def _joined(pieces: Sequence[AttentionPiece]) -> AttentionPiece | None:
    if not pieces:
        return None
    if shared := pieces[0].followed_by(pieces[1:]):
        return shared
    loaded = [piece.loaded() for piece in pieces]
    return KVPiece(
        mx.concatenate([piece.keys for piece in loaded], axis=2),
        mx.concatenate([piece.values for piece in loaded], axis=2),
    )
