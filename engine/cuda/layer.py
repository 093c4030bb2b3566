"""Cache layers on CUDA whose buffers the kernels write in place.

MLX sees these buffers only as inputs, so it never copies them, and a step can be launched while the
previous step still runs. The device's queue keeps reads and writes in order, so all reads and
writes of these buffers must be launched in the order in which they are to happen (see ``put``).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from chairlift.cache.layer import LayerCache
from chairlift.cache.snapshot import KVPiece
from chairlift.engine.cuda import rows as cuda_rows
from chairlift.engine.cuda.kernel import DTYPES, HEAD_DIMS, KeysValues
from chairlift.engine.cuda.rows import RowMove


class CudaLayer(LayerCache):
    """A layer of the decode batch. A step has one token per row, which the attention kernel writes.

    Raises:
        ValueError: keys and values have a shape or type without a kernel.
    """

    queued = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns a step's keys and values unchanged, each ``[rows, key heads, 1, dim]``."""
        check(keys, values)
        if keys.shape[2] != 1:
            raise ValueError(f"steps are of one token a row, not {keys.shape[2]}")
        if self.keys is None:
            self._allocate(keys, values)
        self._fetched = keys, values
        return self._fetched

    def put(self, row: int, held: KVPiece) -> list[mx.array]:
        """See ``LayerCache.put``."""
        if not held.keys.shape[1]:
            return []
        check(held.keys, held.values)
        if self.keys is None:
            self._allocate(held.keys, held.values)
        column = (self.ring.cursors[row] - held.tokens) % self.ring.columns
        return [cuda_rows.put(self.buffers, KeysValues(held.keys, held.values), row, column)]

    def clear(self, row: int) -> None:
        """Does nothing: the kernel reads only columns that the row has written."""

    def clear_newest(self, start: int, stop: int) -> None:
        """Does nothing; see ``clear``."""

    def move(self, moves: Sequence[tuple[int, int]]) -> list[mx.array]:
        """See ``LayerCache.move``."""
        ring = self.ring
        row_moves = [
            RowMove(row, to, (ring.cursors[row] - tokens) % ring.columns, tokens)
            for row, to in moves
            if (tokens := ring.lengths[row])
        ]
        if self.keys is None or not row_moves:
            return []
        return [cuda_rows.move(self.buffers, row_moves)]

    @property
    def buffers(self) -> KeysValues:
        """Keys and values of all rows; they must have been allocated by a write."""
        assert self.keys is not None
        assert self.values is not None
        return KeysValues(self.keys, self.values)


class CudaPrompt(LayerCache):
    """A layer of one prompt's cache, with one row. Later reads of the buffers see each write.

    Raises:
        ValueError: see ``CudaLayer``.
    """

    queued = True

    def _write(self, rows: slice, stop: int, keys: mx.array, values: mx.array) -> None:
        check(keys, values)
        assert self.keys is not None
        assert self.values is not None
        columns = self.ring.columns
        assert keys.shape[0] == 1, "a prompt has one row"
        assert keys.shape[2] <= columns, (keys.shape, columns)
        buffers = KeysValues(self.keys, self.values)
        column = (stop - keys.shape[2]) % columns
        # NOTE: launch it now. Within one CUDA graph it could run in parallel with a later read.
        mx.async_eval(cuda_rows.put(buffers, KeysValues(keys, values), rows.start, column))


def check(keys: mx.array, values: mx.array) -> None:
    """Raises ValueError if there is no kernel for the shape or type of keys and values."""
    alike = keys.shape == values.shape and keys.dtype == values.dtype
    if not alike or keys.dtype not in DTYPES or keys.shape[3] not in HEAD_DIMS:
        raise ValueError(f"no kernel for keys {keys.shape} and values {values.shape}")
