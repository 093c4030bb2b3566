"""The rows of one model's batch: they join, take steps together, are extracted, and leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from chairlift.cache.capacity import Capacity, KVGeometry, grown
from chairlift.cache.layer import LayerCache
from chairlift.cache.ring import Ring
from chairlift.cache.snapshot import KVPiece, LayerKind, Piece, Snapshot, StatePiece
from chairlift.cache.state import StateLayer

Layer = LayerCache | StateLayer


class BatchCache:
    """All layers' caches for a batch of rows, numbered 0 to ``len(batch) - 1`` without holes.

    ``layers`` goes to the model as its cache. A step is::

        with batch.step(length):
            logits = model(tokens, cache=batch.layers)  # tokens: [rows, length]

    Args:
        kinds: what each layer keeps, in the model's order.
        view: turns the list of layers into what the model expects, where it nests them.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        view: Callable[[Sequence[Layer]], Sequence[Any]] = list,
    ) -> None:
        self.kinds = tuple(kinds)
        windows = [kind.window for kind in kinds if not kind.recurrent]
        self._rings = {window: Ring(window) for window in dict.fromkeys(windows)}
        self._parts: list[Layer] = [
            StateLayer() if kind.recurrent else LayerCache(self._rings[kind.window])
            for kind in kinds
        ]
        self.layers = view(self._parts)
        self.offsets: list[int] = []
        # Columns just behind the cursor that a row does not own: the padding after its last token.
        # Such a row can only be extracted and leave.
        self._surplus: list[int] = []
        self._moves: list[mx.array] = []
        self.capacity = Capacity(0, 0)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def pads(self) -> bool:
        """Whether rows may take padding in a step: not if there is a state for it to enter."""
        return not self._states

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers of all layers take."""
        return sum(layer.nbytes for layer in self._parts)

    @property
    def state(self) -> list[mx.array]:
        """All buffers, to evaluate or inspect."""
        return [array for layer in self._parts for array in layer.state]

    @property
    def states(self) -> list[mx.array]:
        """Recurrent states, which nothing of a step's logits need depend on: to be evaluated."""
        return [array for layer in self._states for array in layer.state]

    @property
    def _attention(self) -> list[LayerCache]:
        return [layer for layer in self._parts if isinstance(layer, LayerCache)]

    @property
    def _states(self) -> list[StateLayer]:
        return [layer for layer in self._parts if isinstance(layer, StateLayer)]

    @property
    def tokens(self) -> int:
        """Columns that the longest row takes, padding behind its end included."""
        return max(map(sum, zip(self.offsets, self._surplus, strict=True)), default=0)

    def join(self, state: Snapshot | None = None, columns: int = 0) -> int:
        """Adds a row, empty or with a state of tokens ``[0, stop)``; returns its number.

        Only this row's columns are written, unless the buffers have to grow. ``columns`` announces
        how many tokens the row will come to hold, so that they grow once.
        """
        assert state is None or state.start == 0, state
        offset = state.stop if state else 0
        self.reserve(Capacity(len(self) + 1, max(columns, offset + 1)))
        row = len(self)
        self.offsets.append(offset)
        self._surplus.append(0)
        for ring in self._rings.values():
            ring.lengths.append(min(offset, ring.columns))
        pieces = state.layers if state else (None,) * len(self._parts)
        for layer, piece in zip(self._parts, pieces, strict=True):
            if isinstance(layer, StateLayer):
                layer.join(_state(piece))
            elif isinstance(piece, KVPiece) and piece.tokens:
                layer.put(row, piece.newest(layer.ring.columns))
        return row

    def leave(self, rows: Collection[int]) -> list[int]:
        """Removes rows; the last ones take the freed numbers, and nothing else is touched.

        Returns:
            The former number of each row that remains, in the new order.
        """
        remaining = len(self) - len(rows)
        freed = sorted(row for row in rows if row < remaining)
        movers = [row for row in range(remaining, len(self)) if row not in rows]
        order = list(range(remaining))
        for row, mover in zip(freed, movers, strict=True):
            order[row] = mover
            for layer in self._attention:
                held = layer.get(mover, layer.ring.cursor, layer.ring.lengths[mover])
                if held is not None:
                    held = held.copy()
                    self._moves += [held.keys, held.values]
                    layer.put(row, held)
        for state in self._states:
            state.rearrange(order)
        self.offsets = [self.offsets[row] for row in order]
        self._surplus = [self._surplus[row] for row in order]
        for ring in self._rings.values():
            ring.lengths = [ring.lengths[row] for row in order]
        return order

    def take_moves(self) -> list[mx.array]:
        """Copies of rows on the move, to be evaluated before what is built on the buffers next.

        NOTE: MLX writes into a buffer in place only if nothing else, not even an operation that is
        still running, holds it; else it copies the buffer whole. A row that moves within a buffer
        is therefore read out first.
        """
        moves, self._moves = self._moves, []
        return moves

    def extract(self, row: int, start: int = 0) -> Snapshot:
        """A row's tokens from ``start`` on, as far as they are held; the batch is unchanged.

        The arrays share the buffers' memory until they are copied or have joined elsewhere.
        """
        stop = self.offsets[row]
        layers = tuple(self._extract(layer, row, stop - start) for layer in self._parts)
        return Snapshot(start, stop, layers)

    def _extract(self, layer: Layer, row: int, tokens: int) -> Piece | None:
        if isinstance(layer, StateLayer):
            return layer.get(row)
        ring, surplus = layer.ring, self._surplus[row]
        held = min(tokens, ring.lengths[row] - surplus)
        return layer.get(row, ring.cursor - surplus, held) if held else None

    @contextmanager
    def step(self, length: int, real: Sequence[int] | None = None) -> Iterator[None]:
        """Every row takes ``length`` new tokens from the model call inside.

        ``real`` gives, for each row, how many of them are its own; the others follow as padding,
        and a row that has some can afterwards only be extracted and leave.
        """
        assert not any(self._surplus), "a row that has ended has to leave before the next step"
        real = [length] * len(self) if real is None else list(real)
        assert self.pads or all(new == length for new in real), "padding would enter a state"
        self.reserve(Capacity(len(self), self.tokens + length), step=length)
        offset = mx.array(self.offsets, mx.int32)
        masks: dict[int, dict[tuple[int, int | None, bool], mx.array | str | None]] = {}
        for layer in self._attention:
            layer.begin(offset, masks.setdefault(id(layer.ring), {}))
        yield
        for ring in self._rings.values():
            ring.advance(length)
        self.offsets = [old + new for old, new in zip(self.offsets, real, strict=True)]
        self._surplus = [length - new for new in real]

    def reserve(self, need: Capacity, step: int = 1) -> None:
        """Makes the buffers hold ``need`` and all rows. Never shrinks them; ``resize`` does."""
        self.resize(grown(need, self.capacity), step)

    def resize(self, capacity: Capacity, step: int = 1) -> None:
        """Gives the buffers exactly this capacity, which must be enough for all rows.

        Windows take no more columns than they need to write ``step`` at a time.
        """
        assert capacity.rows >= len(self), (capacity, len(self))
        assert capacity.columns >= self.tokens, (capacity, self.tokens)
        self.capacity = capacity
        for window, ring in self._rings.items():
            columns = ring.needed(capacity.columns, step)
            if window is not None and ring.columns >= columns:
                # Room for a longer step stays: a prompt's last chunk is short, the next one long.
                columns = min(ring.columns, capacity.columns)
            if (ring.rows, ring.columns) == (capacity.rows, columns):
                continue
            kept = ring.spans(ring.cursor, min(columns, max(ring.lengths, default=0)))
            held = Capacity(capacity.rows, columns)
            for layer in self._attention:
                if layer.ring is ring:
                    layer.resize(held, kept)
            ring.rows, ring.columns = held
            ring.cursor = sum(span.width for span in kept) % columns if columns else 0
            ring.lengths = [min(length, columns) for length in ring.lengths]

    def reset(self) -> None:
        """Removes all rows and gives the memory back."""
        for ring in self._rings.values():
            ring.rows = ring.columns = ring.cursor = 0
            ring.lengths = []
        for layer in self._parts:
            layer.reset()
        self.offsets = []
        self._surplus = []
        self._moves = []
        self.capacity = Capacity(0, 0)

    def geometry(self) -> KVGeometry:
        """Bytes by kind of layer, of a token or of a row; needs one step to have been taken."""
        sizes: dict[int | None, int] = {}
        for layer in self._attention:
            size = layer.nbytes // (layer.ring.rows * layer.ring.columns)
            sizes[layer.ring.window] = sizes.get(layer.ring.window, 0) + size
        full = sizes.pop(None, 0)
        windows = {window: size for window, size in sizes.items() if window}
        states = sum(layer.nbytes for layer in self._states)
        return KVGeometry(full, windows, states // max(1, len(self)))

    def check_integrity(self) -> None:
        """Asserts what must hold between two steps."""
        for window, ring in self._rings.items():
            ring.check_integrity()
            assert len(ring.lengths) == len(self)
            for row, length in enumerate(ring.lengths):
                owned = length - self._surplus[row]
                most = self.offsets[row] if window is None else min(self.offsets[row], ring.columns)
                kept = most if window is None else min(most, window - 1)
                assert kept <= owned <= most, (window, row, owned, most)
        for state in self._states:
            state.check_integrity(len(self))
        for layer in self._attention:
            for array in layer.state:
                assert array.shape[0] == layer.ring.rows, (array.shape, layer.ring)
                assert array.shape[2] == layer.ring.columns, (array.shape, layer.ring)
        assert len(self._surplus) == len(self)


def _state(piece: Piece | None) -> StatePiece | None:
    assert piece is None or isinstance(piece, StatePiece), piece
    return piece
