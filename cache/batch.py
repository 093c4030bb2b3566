"""The KV cache of one model's batch: rows join, take steps together, are extracted and leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any

import mlx.core as mx

from chairlift.cache.capacity import Capacity, KVGeometry, grown
from chairlift.cache.chunked import ChunkedLayer, QuantizedChunkedLayer
from chairlift.cache.inspection import check_buffers, check_rings, measured_geometry
from chairlift.cache.layer import LayerCache, Shared
from chairlift.cache.quantized import HalfLayer, Quantization, QuantizedLayer, Storage
from chairlift.cache.ring import Ring, order_without
from chairlift.cache.snapshot import (
    AttentionPiece,
    LayerKind,
    LayerState,
    Snapshot,
    StatePiece,
    resumable,
)
from chairlift.cache.state import StateLayer

Layer = LayerCache | StateLayer


class BatchCache:
    """The caches of all layers for rows numbered 0 to ``len(batch) - 1`` without gaps.

    ``layers`` is passed to the model as its cache. A step is::

        with batch.step(length):
            logits = model(tokens, cache=batch.layers)  # tokens: [rows, length]

    Args:
        kinds: each layer's kind, in the model's order.
        storage: how keys and values are stored; None keeps the model's type.
        view: turns the list of layers into the nesting that the model expects.
        grouped_masks: masks are ``[rows, 1, 1, queries, columns]``, for attention scores with an
            axis for the query heads of a key head.
    """

    # MLX writes the buffers, and copies them while an unfinished step still references them.
    queued = False

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        storage: Storage | None = None,
        view: Callable[[Sequence[Any]], Sequence[Any]] = list,
        grouped_masks: bool = False,
    ) -> None:
        self.kinds = tuple(kinds)
        windows = [kind.window for kind in kinds if not kind.recurrent]
        self._rings = {window: Ring(window) for window in dict.fromkeys(windows)}
        self._parts = [self._layer(kind, storage) for kind in kinds]
        self._attention = [part for part in self._parts if isinstance(part, LayerCache)]
        self._states = [part for part in self._parts if isinstance(part, StateLayer)]
        for layer in self._attention:
            layer.grouped_masks = grouped_masks
        self.view = view
        self.layers = view(self._parts)
        self.offsets: list[int] = []
        # Columns of padding between each row's last token and its cursor: the row has to leave.
        self.surplus: list[int] = []
        self._moves: list[mx.array] = []
        self.capacity = Capacity(0, 0)

    def _layer(self, kind: LayerKind, storage: Storage | None) -> Layer:
        if kind.recurrent:
            return StateLayer(kind.slots)
        ring = self._rings[kind.window]
        if isinstance(storage, Quantization):
            packed = QuantizedChunkedLayer if kind.chunked else QuantizedLayer
            return packed(ring, storage)
        if storage is not None and kind == LayerKind():
            return HalfLayer(ring)
        return ChunkedLayer(ring) if kind.chunked else LayerCache(ring)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def pads(self) -> bool:
        """Whether rows may take padding in a step; it would corrupt a recurrent state."""
        return not self._states

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' buffers."""
        return sum(layer.nbytes for layer in self._parts)

    @property
    def state(self) -> list[mx.array]:
        """All buffers, for evaluation or inspection."""
        return [array for layer in self._parts for array in layer.state]

    @property
    def states(self) -> list[mx.array]:
        """The recurrent states. Evaluate them: a step's logits need not depend on them."""
        return [array for layer in self._states for array in layer.state]

    @property
    def attention(self) -> Sequence[LayerCache]:
        """The layers that cache keys and values."""
        return self._attention

    @property
    def parts(self) -> Sequence[Layer]:
        """All layers, in the order of ``kinds``."""
        return self._parts

    @property
    def total_columns(self) -> int:
        """The number of columns of all rows, including padding."""
        return self.capacity.columns * len(self)

    @property
    def tokens(self) -> int:
        """Columns of the longest row, including the padding after its end."""
        return max(map(add, self.offsets, self.surplus), default=0)

    def join(self, state: Snapshot | None = None, columns: int = 0) -> int:
        """Adds a row, empty or with the state of tokens ``[0, stop)``; returns its number.

        Only this row's columns are written, unless the buffers have to grow. ``columns`` is the
        number of tokens that the row is expected to reach, so that the buffers grow only once.
        """
        offset = state.stop if state else 0
        self.reserve(Capacity(len(self) + 1, max(columns, offset + 1)))
        row = len(self)
        self.offsets.append(0)
        self.surplus.append(0)
        for ring in self._rings.values():
            ring.cursors.append(0)
            ring.lengths.append(0)
        for layer in self._states:
            layer.join()
        if state is not None:
            self.restore(row, state)
        for attention in self._attention:
            attention.clear_stale(row)
        return row

    def restore(self, row: int, state: Snapshot) -> None:
        """Resets a row to ``state``, which covers tokens ``[0, stop)``; other rows are untouched.

        Raises:
            ValueError: the state does not begin at 0, or is too incomplete to resume from its end.
        """
        if state.start or not resumable(self.kinds, [state]):
            raise ValueError(f"a row cannot go on from [{state.start}, {state.stop})")
        self.reserve(Capacity(len(self), state.stop + 1))
        self.offsets[row] = state.stop
        self.surplus[row] = 0
        for ring in self._rings.values():
            ring.place(row, 0)
        for layer, piece in zip(self._parts, state.layers, strict=True):
            if not isinstance(layer, LayerCache):
                layer.put(row, piece if isinstance(piece, StatePiece) else None)
                continue
            layer.rewind()
            if isinstance(piece, AttentionPiece):
                newest = piece.newest(layer.ring.columns).loaded()
                layer.ring.place(row, newest.tokens)
                layer.put(row, newest)

    def rewind(self, row: int, offset: int) -> bool:
        """Truncates a row to its first ``offset`` tokens, where that is possible.

        Full attention rewinds to any position, a window as long as it still has the tokens needed
        there, a recurrent state only to position 0.

        Returns:
            Whether the row was rewound; if not, nothing has changed and a snapshot is needed.

        Raises:
            ValueError: the row has fewer tokens, or ``offset`` is negative.
        """
        if not 0 <= offset <= self.offsets[row]:
            raise ValueError(f"cannot rewind a row of {self.offsets[row]} tokens to {offset}")
        if offset == self.offsets[row]:
            return True
        if not resumable(self.kinds, [self.extract(row).part(0, offset)]):
            return False
        removed = self.offsets[row] + self.surplus[row] - offset
        for ring in self._rings.values():
            ring.rewind(row, removed)
        for layer in self._attention:
            layer.rewind()
        for state in self._states:
            state.put(row, None)
        self.offsets[row] = offset
        self.surplus[row] = 0
        return True

    def leave(self, rows: Collection[int], nonfinite: Collection[int] = ()) -> list[int]:
        """Removes rows; the last rows take the freed numbers, and no other row is touched.

        Attention multiplies masked columns by zero, which does not remove NaN or infinity. Rows
        that may have such values are ``nonfinite``: their next users overwrite all columns. Those
        of other rows overwrite the newest column, which an unread step may have written.

        Returns:
            The former number of each remaining row, in the new order.
        """
        order = order_without(rows, len(self))
        if not rows:
            return order
        moves = [(row, to) for to, row in enumerate(order) if row != to]
        for layer in self._attention:
            self._moves += layer.move(moves)
        for state in self._states:
            state.rearrange(order)
        self.offsets = [self.offsets[row] for row in order]
        self.surplus = [self.surplus[row] for row in order]
        for ring in self._rings.values():
            ring.arrange(order, nonfinite)
        for layer in self._attention:
            for _, row in moves:
                layer.clear_stale(row)
        return order

    def take_moves(self) -> list[mx.array]:
        """Returns and clears the copies of moving rows, to evaluate before the next step is built.

        NOTE: MLX writes into a buffer in place only if nothing else references it, not even an
        operation that is still running; otherwise it copies the entire buffer.
        """
        moves, self._moves = self._moves, []
        return moves

    def hand_over(self, row: int) -> Snapshot:
        """The state of a row that takes no further step."""
        return self.extract(row)

    def extract(self, row: int, start: int = 0) -> Snapshot:
        """A row's cached tokens from ``start`` on; the batch is unchanged.

        The arrays share the buffers' memory until they are copied or joined to another batch.
        """
        stop = self.offsets[row]
        layers = tuple(self._extract(layer, row, stop - start) for layer in self._parts)
        return Snapshot(start, stop, layers)

    def _extract(self, layer: Layer, row: int, tokens: int) -> LayerState | None:
        if not isinstance(layer, LayerCache):
            return layer.get(row)
        ring, surplus = layer.ring, self.surplus[row]
        cached = min(tokens, ring.lengths[row] - surplus)
        return layer.get(row, ring.cursors[row] - surplus, cached) if cached else None

    @contextmanager
    def step(self, length: int, real: Sequence[int] | None = None) -> Iterator[None]:
        """Context of one model call in which every row takes ``length`` new tokens.

        ``real`` is the number of actual tokens of each row; the rest is padding after them. A row
        that took padding can afterwards only be extracted and leave.
        """
        assert not any(self.surplus), "a row that has ended has to leave before the next step"
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
        self.surplus = [length - new for new in real]

    def take_back(self, written: int, kept: Sequence[int]) -> None:
        """Removes the newest ``written`` columns, of which row ``r`` keeps the first ``kept[r]``.

        Attention layers only; ``Speculation`` resets recurrent states. Copies nothing.
        """
        for ring in self._rings.values():
            ring.take_back(written, kept)
        for layer in self._attention:
            layer.take_back()
        rows = zip(self.offsets, self.surplus, kept, strict=True)
        self.offsets = [offset + padding - written + keep for offset, padding, keep in rows]
        self.surplus = [0] * len(self)

    def forget(self, step: int) -> None:
        """Recovers the geometry after a step of ``step`` tokens has failed half way."""
        for ring in self._rings.values():
            ring.forget(step)

    def reserve(self, need: Capacity, step: int = 1) -> None:
        """Grows the buffers to at least ``need``. Never shrinks them; ``resize`` does."""
        self.resize(grown(need, self.capacity), step)

    def resize(self, capacity: Capacity, step: int = 1) -> None:
        """Sets the buffers to exactly this capacity, which must suffice for all rows.

        Windows get no more columns than writing ``step`` tokens at a time needs.
        """
        assert capacity.rows >= len(self), (capacity, len(self))
        assert capacity.columns >= self.tokens, (capacity, self.tokens)
        self.capacity = capacity
        rings: list[tuple[Ring, Capacity]] = []
        for ring in self._rings.values():
            columns = ring.allotted(capacity.columns, step)
            if (ring.rows, ring.columns) != (capacity.rows, columns):
                rings.append((ring, Capacity(capacity.rows, columns)))
        # Shrink before growing, to bound the memory in use; see KVGeometry.moved.
        rings.sort(key=lambda pair: math.prod(pair[1]) - pair[0].rows * pair[0].columns)
        for ring, size in rings:
            kept = ring.kept(size.columns)
            mx.async_eval(self._moves)  # they may include pending writes to the old buffers
            for layer in self._attention:
                if layer.ring is ring and layer.resize(size, kept):
                    # One layer at a time, or all old and new buffers would be allocated at once.
                    mx.eval(layer.state)
                    mx.synchronize()
            ring.resize(*size)

    def reset(self) -> None:
        """Removes all rows and frees the memory."""
        for ring in self._rings.values():
            ring.arrange([])
            ring.resize(0, 0)
        for layer in self._parts:
            layer.reset()
        self.offsets = []
        self.surplus = []
        self._moves = []
        self.capacity = Capacity(0, 0)

    def geometry(self) -> KVGeometry:
        """Bytes of a token or of a row by kind of layer; only after at least one step."""
        return measured_geometry(self._attention, self._states, len(self))

    def check_integrity(self) -> None:
        """Asserts the invariants between two steps."""
        check_rings(self._rings, self.offsets, self.surplus)
        for state in self._states:
            state.check_integrity(len(self))
        check_buffers(self._attention)
