"""One attention layer's keys and values; implements mlx-lm's cache protocol."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.capacity import Capacity
from chairlift.cache.ring import Ring, Span, gather
from chairlift.cache.snapshot import KVPiece

Mask = mx.array | str | None


@dataclass(slots=True)
class Shared:
    """Arrays that all layers of a kind share in a step, made at first use.

    Attributes:
        masks: by the arguments of ``make_mask``.
        places: rows ``[rows, 1]`` and columns ``[rows, new]`` of the step's new tokens.
        visible: the columns that attention reads; see ``Ring.visible``.
        written: the rows and columns of the step's new tokens, for NumPy.
    """

    masks: dict[tuple[int, int | None, bool], Mask] = field(default_factory=dict)
    places: tuple[mx.array, mx.array] | None = None
    visible: slice | None = None
    written: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None


class HostPlaces(NamedTuple):
    """The places in the buffers at which the host writes a step's new tokens.

    Attributes:
        keys, values: the buffers, ``[rows, heads, columns, dim]``.
        rows, columns: the place of each token, row by row.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]

    def write(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Writes ``[tokens, heads, dim]``; numbers beyond the type's range become its largest."""
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if buffer.dtype != new.dtype:
                new = new.clip(-(largest := np.finfo(buffer.dtype).max), largest)
            buffer[self.rows, :, self.columns] = new


class LayerCache:
    """The ring buffer of one attention layer: ``[rows, heads, columns, dim]`` for keys and values.

    The value's last dimension may differ from the key's. The class implements mlx-lm's cache
    protocol (``offset``, ``make_mask``, ``update_and_fetch``, ``state``, ``nbytes``), so that
    mlx-lm's model files run unchanged. All layers of a kind share the geometry of one ``Ring``.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        # Positions of each row's first new token, [rows]; rebound each step, never written to.
        self.offset: mx.array = mx.zeros((0,), mx.int32)
        self.shared = Shared()
        self._fetched: tuple[mx.array, mx.array] | None = None
        # The rows and new columns that NumPy has written, until they are fetched.
        self._step: tuple[int, int] | None = None
        # Whether a snapshot was extracted since the last transaction began.
        self._lent = True
        # Whether snapshots may share columns that rows write next.
        self._rewound = False
        self.grouped_masks = False

    @property
    def max_size(self) -> int | None:
        """The window in tokens, None for full attention."""
        return self.ring.window

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The buffers, for inspection and evaluation. Empty before the first write."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(array.nbytes for array in self.state)

    def begin(self, offset: mx.array, shared: Shared) -> None:
        """Starts a step: its row offsets, and the arrays that layers of this kind share."""
        self.offset = offset
        self.shared = shared

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The attention mask for ``n`` new queries per row; see ``Ring.mask``."""
        key = (n, window_size, return_array)
        masks = self.shared.masks
        if key not in masks:
            mask = self._mask(n, window_size, return_array)
            if self.grouped_masks and isinstance(mask, mx.array):
                mask = mask[:, :, None]
            masks[key] = mask
        return masks[key]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes new columns for all rows and returns the columns for attention to read.

        Args:
            keys, values: ``[rows, heads, new, dim]``, oldest first.

        Returns:
            Keys and values ``[rows, heads, visible columns, dim]``, as ``make_mask`` describes.
        """
        rows, _, step, _ = keys.shape
        ring = self.ring
        if (
            self.keys is None
            and (ring.rows, ring.columns) == (rows, step)
            and not any(ring.cursors)
        ):
            # These arrays fill the buffers exactly, so they become the buffers.
            self.keys, self.values = self._fetched = keys, values
            return keys, values
        if self.keys is None or self.values is None:
            self._allocate(keys, values)
        assert self.keys is not None
        assert self.values is not None
        if ring.aligned:
            self._write(slice(0, rows), ring.cursors[0] + step, keys, values)
        else:
            self._scatter(keys, values)
        if any(ring.lengths) or any(ring.cursors):
            return self._fetch(rows, step)
        self._fetched = keys, values  # there is no older column to read
        return keys, values

    def host_places(self, counts: Sequence[int], dtype: np.dtype[Any]) -> HostPlaces | None:
        """As ``update_and_fetch``, but the caller writes the tokens, at once and without padding.

        For eager steps on the CPU. MLX, which copies shared buffers, writes where a snapshot may
        read the columns: in rows that were rewound, and in windows that a snapshot may share.

        Args:
            counts: the new tokens of each row.
            dtype: of the tokens.

        Returns:
            None if MLX has to write, or there are no buffers of this type yet. Otherwise
            ``keys_and_values`` returns the columns to read, as soon as they are written.
        """
        ring = self.ring
        if self._rewound or self.keys is None or self.values is None:
            return None
        mx.eval(self.keys, self.values)
        keys, values = (np.array(buffer, copy=False) for buffer in (self.keys, self.values))
        if keys.dtype != dtype or values.dtype != dtype:
            return None
        if self.shared.written is None:
            taken, cursors = np.array(counts, np.intp), np.array(ring.cursors, np.intp)
            rows = np.repeat(np.arange(len(counts), dtype=np.intp), taken)
            firsts = cursors - (np.cumsum(taken) - taken)  # a row's column, less its token's number
            columns = firsts[rows] + np.arange(len(rows), dtype=np.intp)
            self.shared.written = rows, columns % ring.columns
        self._fetched, self._step = None, (len(counts), max(counts))
        return HostPlaces(keys, values, *self.shared.written)

    def seen(self, mask: Mask, counts: Sequence[int]) -> list[tuple[int, int]] | None:
        """See ``Ring.seen``; None if the model's ``mask`` shows tokens anything else."""
        kinds = {False, isinstance(mask, mx.array)}
        own = (self.make_mask(max(counts), w, a) for w in (None, self.ring.window) for a in kinds)
        return self.ring.seen(counts) if any(mask is each for each in own) else None

    def _fetch(self, rows: int, step: int) -> tuple[mx.array, mx.array]:
        """The columns for attention to read, once a step's new tokens are written."""
        assert self.keys is not None
        assert self.values is not None
        seen = self.shared.visible = self.shared.visible or slice(*self.ring.visible(step))
        self._fetched = self.keys[:rows, :, seen], self.values[:rows, :, seen]
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The result of this step's ``update_and_fetch``, for a layer that shares this one's KV."""
        if self._fetched is None:
            assert self._step is not None, "nothing has been written in this step"
            return self._fetch(*self._step)
        return self._fetched

    def end(self) -> None:
        """Drops the step's views: MLX writes in place only into unreferenced buffers."""
        self._fetched = self._step = None

    def put(self, row: int, piece: KVPiece) -> None:
        """Copies one row's tokens into the columns directly before the cursor of that row."""
        if piece.keys.shape[1]:
            if self.keys is None or self.values is None:
                self._allocate(piece.keys, piece.values)
            self._write(slice(row, row + 1), self.ring.cursors[row], piece.keys, piece.values)
            self._rewound |= self.ring.window is not None

    def move(self, moves: Sequence[tuple[int, int]]) -> list[mx.array]:
        """Copies rows over others, ``(row, to)`` each; no row is in two of the moves.

        The rows keep their columns.

        Returns:
            The arrays to evaluate before anything else is built on the buffers.
        """
        # Read all before writing any, so that no read depends on a write.
        cursors, lengths = self.ring.cursors, self.ring.lengths
        copies = [self.get(row, cursors[row], lengths[row]).copy() for row, _ in moves]
        for (row, to), copy in zip(moves, copies, strict=True):
            if lengths[row] and self.keys is not None:
                self._write(slice(to, to + 1), cursors[row], copy.keys, copy.values)
        return [array for copy in copies for array in copy.arrays]

    def rewind(self) -> None:
        """Notes that rows will overwrite columns, which snapshots may share."""
        self._rewound = True

    def begin_transaction(self) -> None:
        """Begins a transaction: ``take_back`` may take some of its tokens back."""
        self._lent = False

    def take_back(self) -> None:
        """As ``rewind``, for tokens of the last transaction only."""
        if self._lent:
            self.rewind()

    def clear_stale(self, row: int) -> None:
        """Overwrites the columns ``Ring.stale`` with zeros, once a row has another sequence."""
        for span in self.ring.stale(row):
            self._clear(slice(row, row + 1), slice(*span))

    def get(self, row: int, stop: int, tokens: int) -> KVPiece:
        """The ``tokens`` columns of one row before column ``stop``.

        If the model has never written to this layer, the piece has no heads.
        """
        self._lent = True
        self._rewound |= self.ring.window is not None
        if self.keys is None or self.values is None:
            empty = mx.zeros((1, 0, tokens, 0))
            return KVPiece(empty, empty)
        spans = self.ring.spans(stop, tokens)
        rows = slice(row, row + 1)
        return KVPiece(gather(self.keys[rows], spans), gather(self.values[rows], spans))

    def resize(self, capacity: Capacity, kept: Sequence[Sequence[Span]]) -> bool:
        """Reallocates the buffers: in each row its ``kept`` columns, in that order, then zeros.

        Returns:
            Whether there were buffers to reallocate.
        """
        if self.keys is None or self.values is None:
            return False
        self.keys = _resized(self.keys, capacity, kept)
        self.values = _resized(self.values, capacity, kept)
        return True

    def reset(self) -> None:
        """Frees the memory."""
        self.keys = self.values = None
        self.shared = Shared()

    def _mask(self, n: int, window_size: int | None, return_array: bool) -> Mask:
        return self.ring.mask(n, window_size, return_array)

    def _allocate(self, keys: mx.array, values: mx.array) -> None:
        rows, columns = self.ring.rows, self.ring.columns
        self.keys = _zeros((rows, keys.shape[1], columns, keys.shape[3]), keys.dtype)
        self.values = _zeros((rows, values.shape[1], columns, values.shape[3]), values.dtype)

    def _clear(self, rows: slice, columns: slice) -> None:
        if self.keys is not None and self.values is not None:
            for buffer in (self.keys, self.values):
                if not buffer.size:
                    continue
                # NOTE: a number that is assigned to all of a buffer becomes its only memory, into
                # which ``host_places`` points.
                buffer[rows, :, columns] = _zeros(buffer[rows, :, columns].shape, buffer.dtype)

    def _scatter(self, keys: mx.array, values: mx.array) -> None:
        """Writes a step's new tokens, each row's from its cursor on, round the ring."""
        assert self.keys is not None
        assert self.values is not None
        if self.shared.places is None:
            new = mx.array(self.ring.cursors)[:, None] + mx.arange(keys.shape[2])
            self.shared.places = mx.arange(len(keys))[:, None], new % self.ring.columns
        rows, columns = self.shared.places
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if new.size:  # NOTE: MLX 0.32.4 divides by zero in a scatter of nothing
                buffer[rows, :, columns] = new.swapaxes(1, 2)
        self._rewound = False

    def _write(self, rows: slice, stop: int, keys: mx.array, values: mx.array) -> None:
        """Writes tokens into the columns before ``stop``, the same in all ``rows``."""
        assert self.keys is not None
        assert self.values is not None
        taken = 0
        for span in self.ring.spans(stop, keys.shape[2]):
            columns, part = slice(*span), slice(taken, taken + span.width)
            for buffer, new in ((self.keys, keys), (self.values, values)):
                if new.size:
                    buffer[rows, :, columns] = new[:, :, part]
            taken += span.width
        self._rewound = False


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.full(shape, _zero(dtype))


@functools.cache
def _zero(dtype: mx.Dtype) -> mx.array:
    """A zero; cached, because writing a number into device-visible memory is slow on the host."""
    return mx.array(0, dtype)


def _resized(buffer: mx.array, capacity: Capacity, kept: Sequence[Sequence[Span]]) -> mx.array:
    _, heads, _, dim = buffer.shape
    rows = min(len(buffer), len(kept))
    width = max((spans[-1].stop for spans in kept if spans), default=0)
    in_place = all(not spans or spans[0].start == 0 for spans in kept) and width <= capacity.columns
    if in_place and width and buffer.size and rows == capacity.rows:
        # NOTE: an assignment to zeros, as below, would write every number twice.
        shape = rows, heads, capacity.columns - width, dim
        parts = [buffer[:rows, :, :width], mx.broadcast_to(_zero(buffer.dtype), shape)]
        return mx.contiguous(mx.concatenate(parts if shape[2] else parts[:1], axis=2))
    moved = _zeros((capacity.rows, heads, capacity.columns, dim), buffer.dtype)
    if not buffer.size:
        # NOTE: on CUDA, MLX 0.32.4 gives an array of no size no memory if something is assigned to
        # it, and ends the process once the array is used.
        return moved
    if in_place:
        moved[:rows, :, :width] = buffer[:rows, :, :width]
    else:
        for row, spans in enumerate(kept):
            tokens = sum(span.width for span in spans)
            moved[row, :, :tokens] = gather(buffer[row : row + 1], spans)[0]
    # NOTE: what is assigned to all of ``moved`` shares the old buffer's memory and would keep it.
    return mx.contiguous(moved)
