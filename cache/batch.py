"""The rows of one model's batch: they join, take steps together, are extracted, and leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from chairlift.cache.capacity import Capacity, KVGeometry, grown
from chairlift.cache.chunked import ChunkedLayer, QuantizedChunkedLayer
from chairlift.cache.layer import LayerCache, Shared
from chairlift.cache.quantized import Quantization, QuantizedLayer
from chairlift.cache.ring import Ring
from chairlift.cache.snapshot import KVPiece, LayerKind, Piece, Snapshot, StatePiece, resumable
from chairlift.cache.state import StateLayer

Layer = LayerCache | StateLayer
# Copies of rows that move at a commit are held together up to this: few waits, little memory.
MOVED_BYTES = 256 << 20


class BatchCache:
    """All layers' caches for a batch of rows, numbered 0 to ``len(batch) - 1`` without holes.

    ``layers`` goes to the model as its cache. A step is::

        with batch.step(length):
            logits = model(tokens, cache=batch.layers)  # tokens: [rows, length]

    Args:
        kinds: what each layer keeps, in the model's order.
        quantization: of the keys and values; None keeps the model's own numbers.
        view: turns the list of layers into what the model expects, where it nests them.
        grouped_masks: masks are ``[rows, 1, 1, queries, columns]``, for scores that have an axis
            for the query heads of a key head.
        plain: what attention layers are that are neither quantized nor chunked.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        quantization: Quantization | None = None,
        view: Callable[[Sequence[Any]], Sequence[Any]] = list,
        grouped_masks: bool = False,
        plain: type[LayerCache] = LayerCache,
    ) -> None:
        self.kinds = tuple(kinds)
        self._plain = plain
        windows = [kind.window for kind in kinds if not kind.recurrent]
        self._rings = {window: Ring(window) for window in dict.fromkeys(windows)}
        self._parts = [self._layer(kind, quantization) for kind in kinds]
        self._attention = [part for part in self._parts if isinstance(part, LayerCache)]
        self._states = [part for part in self._parts if isinstance(part, StateLayer)]
        for layer in self._attention:
            layer.grouped_masks = grouped_masks
        self.view = view
        self.layers = view(self._parts)
        self.offsets: list[int] = []
        # Columns just behind the cursor that a row does not own: the padding after its last token.
        # Such a row can only be extracted and leave.
        self._surplus: list[int] = []
        self._moves: list[mx.array] = []
        self.capacity = Capacity(0, 0)

    def _layer(self, kind: LayerKind, quantization: Quantization | None) -> Layer:
        if kind.recurrent:
            return StateLayer(kind.slots)
        ring = self._rings[kind.window]
        if quantization:
            packed = QuantizedChunkedLayer if kind.chunked else QuantizedLayer
            return packed(ring, quantization)
        return ChunkedLayer(ring) if kind.chunked else self._plain(ring)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def pads(self) -> bool:
        """Whether rows may take padding in a step: not if there is a state for it to enter."""
        return not self._states

    @property
    def queued(self) -> bool:
        """Whether all layers are; see ``LayerCache.queued``."""
        return all(isinstance(part, LayerCache) and part.queued for part in self._parts)

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
    def attention(self) -> Sequence[LayerCache]:
        """The layers that keep keys and values."""
        return self._attention

    @property
    def parts(self) -> Sequence[Layer]:
        """The layers one by one, as ``kinds`` has them."""
        return self._parts

    @property
    def surplus(self) -> list[int]:
        """For each row, the columns of padding after its last token."""
        return list(self._surplus)

    @property
    def tokens(self) -> int:
        """Columns that the longest row takes, padding behind its end included."""
        return max(map(sum, zip(self.offsets, self._surplus, strict=True)), default=0)

    def join(self, state: Snapshot | None = None, columns: int = 0) -> int:
        """Adds a row, empty or with a state of tokens ``[0, stop)``; returns its number.

        Only this row's columns are written, unless the buffers have to grow. ``columns`` announces
        how many tokens the row will come to hold, so that they grow once.
        """
        offset = state.stop if state else 0
        self.reserve(Capacity(len(self) + 1, max(columns, offset + 1)))
        row = len(self)
        self.offsets.append(0)
        self._surplus.append(0)
        for ring in self._rings.values():
            ring.lengths.append(0)
        for layer in self._states:
            layer.join()
        if state is not None:
            self.restore(row, state)
        return row

    def restore(self, row: int, state: Snapshot) -> None:
        """Puts a row to where ``state`` of tokens ``[0, stop)`` was taken; no other is touched.

        Raises:
            ValueError: the state does not begin at 0, or lacks what going on from its end takes.
        """
        if state.start or not resumable(self.kinds, [state]):
            raise ValueError(f"a row cannot go on from [{state.start}, {state.stop})")
        self.reserve(Capacity(len(self), state.stop + 1))
        self.offsets[row] = state.stop
        self._surplus[row] = 0
        for ring in self._rings.values():
            ring.lengths[row] = 0
        for layer, piece in zip(self._parts, state.layers, strict=True):
            if not isinstance(layer, LayerCache):
                layer.put(row, _state(piece))
            elif isinstance(piece, KVPiece):
                held = piece.newest(layer.ring.columns)
                self._moves += layer.put(row, held)
                layer.ring.lengths[row] = held.tokens

    def rewind(self, row: int, offset: int) -> bool:
        """Takes a row back to its first ``offset`` tokens, where that is possible.

        Full attention goes back anywhere, a window while it has lost nothing that is needed there,
        a recurrent state only to its beginning; to where the row is, all of them. The row's columns
        are moved, because they lie behind the cursor without a gap.

        Returns:
            Whether it was; else nothing has changed, and a snapshot is needed.

        Raises:
            ValueError: the row has fewer tokens, or ``offset`` is negative.
        """
        if not 0 <= offset <= self.offsets[row]:
            raise ValueError(f"cannot rewind a row of {self.offsets[row]} tokens to {offset}")
        if offset == self.offsets[row]:
            return True
        state = self.extract(row).part(0, offset)
        if not resumable(self.kinds, [state]):
            return False
        state = state.copy()
        self._moves += state.arrays
        self.restore(row, state)
        return True

    def leave(self, rows: Collection[int], nonfinite: Collection[int] = ()) -> list[int]:
        """Removes rows; the last ones take the freed numbers, and nothing else is touched.

        What a mask hides still counts as zero times what it is, which NaN and infinity are not. So
        rows that are ``nonfinite`` are overwritten whole, and of the numbers that nobody takes the
        newest column is, which a step that has not been read yet has written.

        Returns:
            The former number of each row that remains, in the new order.
        """
        remaining = len(self) - len(rows)
        freed = sorted(row for row in rows if row < remaining)
        movers = [row for row in range(remaining, len(self)) if row not in rows]
        order = list(range(remaining))
        moves = list(zip(movers, freed, strict=True))
        for mover, row in moves:
            order[row] = mover
        for layer in self._attention:
            for row in nonfinite:
                layer.clear(row)
            self._moves += layer.move(moves)
            layer.clear_newest(remaining, len(self))
        for state in self._states:
            state.rearrange(order)
        self.offsets = [self.offsets[row] for row in order]
        self._surplus = [self._surplus[row] for row in order]
        for ring in self._rings.values():
            ring.lengths = [ring.lengths[row] for row in order]
        return order

    def take_moves(self) -> list[mx.array]:
        """What rows on the move and rows that join need to have evaluated, before anything else is
        built on the buffers.

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
        if not isinstance(layer, LayerCache):
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
        shared: dict[tuple[int, type], Shared] = {}
        for layer in self._attention:
            layer.begin(offset, shared.setdefault((id(layer.ring), type(layer)), Shared()))
        yield
        for layer in self._attention:
            layer.end()
        for ring in self._rings.values():
            ring.advance(length)
        self.offsets = [old + new for old, new in zip(self.offsets, real, strict=True)]
        self._surplus = [length - new for new in real]

    def settle(self, written: int, kept: Sequence[int]) -> None:
        """Takes back the newest ``written`` columns, but row ``r`` keeps the first ``kept[r]``.

        For attention layers; what states go back to, ``Speculation`` knows. A row that moves is
        read out, a few layers at a time, before it is written: so it waits for the device.
        """
        moves = {window: ring.settle(written, kept) for window, ring in self._rings.items()}
        waiting: list[tuple[LayerCache, int, KVPiece]] = []
        for layer in self._attention:
            moving = [move for move in moves[layer.ring.window] if move.tokens]
            waiting += [(layer, move.row, layer.get(*move).copy()) for move in moving]
            if sum(held.nbytes for _, _, held in waiting) > MOVED_BYTES:
                _put(waiting)
                waiting = []
        _put(waiting)
        own = zip(self.offsets, self._surplus, kept, strict=True)
        self.offsets = [offset + padding - written + keep for offset, padding, keep in own]
        self._surplus = [0] * len(self)

    def forget(self, step: int) -> None:
        """To be called when a step of ``step`` tokens has failed half way."""
        for ring in self._rings.values():
            ring.forget(step)

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
        rings: list[tuple[Ring, Capacity]] = []
        for window, ring in self._rings.items():
            columns = ring.needed(capacity.columns, step)
            if window is not None and ring.columns >= columns:
                # Room for a longer step stays: a prompt's last chunk is short, the next one long.
                columns = min(ring.columns, capacity.columns)
            if (ring.rows, ring.columns) != (capacity.rows, columns):
                rings.append((ring, Capacity(capacity.rows, columns)))
        # Shrinking ones first; see KVGeometry.moved.
        rings.sort(key=lambda pair: math.prod(pair[1]) - pair[0].rows * pair[0].columns)
        for ring, held in rings:
            kept = ring.spans(ring.cursor, min(held.columns, max(ring.lengths, default=0)))
            mx.async_eval(self._moves)  # which may be what writes to the old buffers
            for layer in self._attention:
                if layer.ring is ring and layer.resize(held, kept):
                    # One after the other, or the old and the new ones of all would be held at once.
                    mx.eval(layer.state)
                    mx.synchronize()
            ring.rows, ring.columns = held
            ring.cursor = sum(span.width for span in kept) % held.columns if held.columns else 0
            ring.lengths = [min(length, held.columns) for length in ring.lengths]

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
        largest: dict[int | None, int] = {}
        for layer in self._attention:
            window, size = layer.ring.window, layer.nbytes // (layer.ring.rows * layer.ring.columns)
            sizes[window] = sizes.get(window, 0) + size
            largest[window] = max(largest.get(window, 0), size)
        full = sizes.pop(None, 0)
        windows = {window: size for window, size in sizes.items() if window}
        states = sum(layer.nbytes for layer in self._states)
        return KVGeometry(full, windows, states // max(1, len(self)), largest)

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


def _put(waiting: Sequence[tuple[LayerCache, int, KVPiece]]) -> None:
    # See take_moves: read out first, and all of it, or MLX would copy the buffers.
    mx.eval([held.arrays for _, _, held in waiting])
    for layer, row, held in waiting:
        layer.put(row, held)
    mx.eval([layer.state for layer, _, _ in waiting])
