"""One layer's keys and values, in the shape that mlx-lm's model files expect of a cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from chairlift.cache.capacity import Capacity
from chairlift.cache.ring import Ring, Span
from chairlift.cache.snapshot import KVPiece

Mask = mx.array | str | None


@dataclass(slots=True)
class Shared:
    """What the layers of a kind share in a step, made when one of them first asks for it.

    ``masks`` are held by what ``make_mask`` was asked for, ``lengths`` by their limit. ``traced``:
    the step is being compiled, and nothing of it can be evaluated.
    """

    masks: dict[tuple[int, int | None, bool], Mask] = field(default_factory=dict)
    lengths: dict[int | None, mx.array] = field(default_factory=dict)
    cursor: mx.array | None = None
    traced: bool = False


class LayerCache:
    """The ring buffer of one attention layer: ``[rows, heads, columns, dim]`` for keys and values.

    The value's last dimension may differ from the key's. It keeps mlx-lm's cache protocol
    (``offset``, ``make_mask``, ``update_and_fetch``, ``state``, ``nbytes``), so that mlx-lm's model
    files run unchanged. What all layers of a kind share, they read from one ``Ring``.
    """

    # Whether buffers are written to without MLX: reads and writes happen in the order in which they
    # are evaluated, and a step may be evaluated while the one before still runs.
    queued = False

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        # Positions of each row's first new token, [rows]; rebound each step, never written to.
        self.offset: mx.array = mx.zeros((0,), mx.int32)
        self.shared = Shared()
        self._fetched: tuple[mx.array, mx.array] | None = None
        self.grouped_masks = False

    @property
    def max_size(self) -> int | None:
        """The window in tokens, None for full attention."""
        return self.ring.window

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The buffers, for inspection and for evaluating them. Empty before the first write."""
        if self.keys is None or self.values is None:
            return ()
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes the buffers take."""
        return sum(array.nbytes for array in self.state)

    def begin(self, offset: mx.array, shared: Shared) -> None:
        """Takes a step's row offsets, and what layers of this kind share in it."""
        self.offset = offset
        self.shared = shared

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The attention mask for ``n`` new queries a row; see ``Ring.mask``."""
        key = (n, window_size, return_array)
        masks = self.shared.masks
        if key not in masks:
            mask = self._mask(n, window_size, return_array)
            if self.grouped_masks and isinstance(mask, mx.array):
                mask = mask[:, :, None]
            masks[key] = mask
        return masks[key]

    def seen(self, mask: Mask) -> mx.array | None:
        """How many columns behind the cursor a mask shows each row's one new query.

        Returns:
            ``[rows]`` int32, the query's own column included; None if the mask is not one that
            ``make_mask`` gave for one query a row in this step.
        """
        asked = (key for key, own in self.shared.masks.items() if own is mask and key[0] == 1)
        key = next(asked, None)
        if key is None:
            return None
        return self.lengths(key[1])

    def lengths(self, limit: int | None) -> mx.array:
        """How many columns behind the cursor each row sees of a step of one token, ``[rows]``
        int32, its own included; no more than ``limit``.
        """
        lengths = self.shared.lengths
        if limit not in lengths:
            most = min(limit or self.ring.columns, self.ring.window or self.ring.columns)
            lengths[limit] = mx.array([min(n + 1, most) for n in self.ring.lengths], mx.int32)
        return lengths[limit]

    @property
    def newest(self) -> mx.array:
        """The column behind the newest of a step of one token, ``[1]`` int32."""
        if self.shared.cursor is None:
            self.shared.cursor = mx.array([self.ring.cursor + 1], mx.int32)
        return self.shared.cursor

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes new columns for all rows and returns what attention has to read.

        Args:
            keys, values: ``[rows, heads, new, dim]``, oldest first.

        Returns:
            Keys and values ``[rows, heads, visible columns, dim]``, as ``make_mask`` describes.
        """
        rows, _, step, _ = keys.shape
        if self.keys is None and (self.ring.rows, self.ring.columns) == (rows, step):
            # What fills the buffers becomes the buffers.
            self.keys, self.values = self._fetched = keys, values
            return self._fetched
        if self.keys is None or self.values is None:
            self._allocate(keys, values)
        assert self.keys is not None
        assert self.values is not None
        self._write(slice(0, rows), self.ring.cursor + step, keys, values)
        seen = slice(*self.ring.visible(step))
        if seen.stop - seen.start == step and not any(self.ring.lengths):
            self._fetched = keys, values  # there is nothing else to read
            return self._fetched
        self._fetched = self.keys[:rows, :, seen], self.values[:rows, :, seen]
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What this step's ``update_and_fetch`` returned, for a layer that shares this one's KV."""
        assert self._fetched is not None, "nothing has been written in this step"
        return self._fetched

    def end(self) -> None:
        """Lets go of what a step has read: MLX writes in place only into what nobody holds."""
        self._fetched = None

    def put(self, row: int, held: KVPiece) -> list[mx.array]:
        """Copies one row's tokens into the columns just behind the cursor; touches no other row.

        Returns:
            What has to be evaluated for it, if the buffers are not enough.
        """
        if not held.keys.shape[1]:
            return []
        if self.keys is None or self.values is None:
            self._allocate(held.keys, held.values)
        self._write(slice(row, row + 1), self.ring.cursor, held.keys, held.values)
        return []

    def move(self, moves: Sequence[tuple[int, int]]) -> list[mx.array]:
        """Copies rows over others, ``(row, to)`` each; no row is in two of the moves.

        Returns:
            What has to be evaluated for it, before anything is built on the buffers.
        """
        # All are read before any is written: what is read must not depend on a write.
        cursor, lengths = self.ring.cursor, self.ring.lengths
        held = [self.get(row, cursor, lengths[row]).copy() for row, _ in moves]
        for (_, to), moved in zip(moves, held, strict=True):
            self.put(to, moved)
        return [array for moved in held for array in moved.arrays]

    def clear(self, row: int) -> None:
        """Overwrites all columns of a row with zeros."""
        self._clear(slice(row, row + 1), slice(None))

    def clear_newest(self, start: int, stop: int) -> None:
        """Overwrites the newest column of the rows from ``start`` to below ``stop`` with zeros."""
        if start < stop and self.ring.columns:
            newest = (self.ring.cursor - 1) % self.ring.columns
            self._clear(slice(start, stop), slice(newest, newest + 1))

    def get(self, row: int, stop: int, tokens: int) -> KVPiece:
        """The ``tokens`` columns of one row before column ``stop``.

        Of a layer that the model never writes to they have no heads.
        """
        if self.keys is None or self.values is None:
            nothing = mx.zeros((1, 0, tokens, 0))
            return KVPiece(nothing, nothing)
        spans = self.ring.spans(stop, tokens)
        own = slice(row, row + 1)
        return KVPiece(gather(self.keys[own], spans), gather(self.values[own], spans))

    def resize(self, capacity: Capacity, kept: Sequence[Span]) -> bool:
        """Moves to buffers of another size: ``kept`` columns first, in that order, then zeros.

        Returns:
            Whether there is anything to move.
        """
        if self.keys is None or self.values is None:
            return False
        self.keys = _resized(self.keys, capacity, kept)
        self.values = _resized(self.values, capacity, kept)
        return True

    def reset(self) -> None:
        """Gives the memory back."""
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
            self.keys[rows, :, columns] = _zero(self.keys.dtype)
            self.values[rows, :, columns] = _zero(self.values.dtype)

    def _write(self, rows: slice, stop: int, keys: mx.array, values: mx.array) -> None:
        """Writes tokens into the columns before ``stop``, round the ring."""
        assert self.keys is not None
        assert self.values is not None
        taken = 0
        for span in self.ring.spans(stop, keys.shape[2]):
            columns, part = slice(*span), slice(taken, taken + span.width)
            self.keys[rows, :, columns] = keys[:, :, part]
            self.values[rows, :, columns] = values[:, :, part]
            taken += span.width


def gather(buffer: mx.array, spans: Sequence[Span]) -> mx.array:
    """The columns of some runs of ``[rows, heads, columns, dim]``, one run behind the other."""
    parts = [buffer[:, :, span.start : span.stop] for span in spans]
    if not parts:
        return buffer[:, :, :0]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.full(shape, _zero(dtype))


@functools.cache
def _zero(dtype: mx.Dtype) -> mx.array:
    """Made once: where a device reads it, the host takes long to write a number."""
    return mx.array(0, dtype)


def _resized(buffer: mx.array, capacity: Capacity, kept: Sequence[Span]) -> mx.array:
    rows = min(capacity.rows, buffer.shape[0])
    _, heads, _, dim = buffer.shape
    moved = _zeros((capacity.rows, heads, capacity.columns, dim), buffer.dtype)
    taken = 0
    for span in kept:
        part = slice(taken, taken + span.width)
        moved[:rows, :, part] = buffer[:rows, :, span.start : span.stop]
        taken += span.width
    return moved
