"""Cache layers on CUDA whose buffers the kernels write in place.

MLX sees these buffers only as inputs, so it never copies them, and a step can be launched while the
one before still runs. The device's queue keeps reads and writes in order: everything that reads or
writes these buffers is launched in the order in which it has to happen (see ``put``).
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
    """A layer of the decode batch. Steps have one token a row, which the attention kernel writes.

    Raises:
        ValueError: keys and values have a shape or type without a kernel.
    """

    queued = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keeps a step's ``[rows, heads, 1, dim]`` for attention, and returns them as they are."""
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
        column = (self.ring.cursor - held.tokens) % self.ring.columns
        return [cuda_rows.put(self.buffers, KeysValues(held.keys, held.values), row, column)]

    def clear(self, row: int) -> None:
        """Does nothing: the kernel reads only columns that the row has written."""

    def clear_newest(self, start: int, stop: int) -> None:
        """Nothing; see ``clear``."""

    def move(self, moves: Sequence[tuple[int, int]]) -> list[mx.array]:
        """See ``LayerCache.move``."""
        ring = self.ring
        held = [
            RowMove(row, to, (ring.cursor - tokens) % ring.columns, tokens)
            for row, to in moves
            if (tokens := ring.lengths[row])
        ]
        return [cuda_rows.move(self.buffers, held)] if self.keys is not None and held else []

    @property
    def buffers(self) -> KeysValues:
        """Keys and values of all rows. Something must have been written before."""
        assert self.keys is not None
        assert self.values is not None
        return KeysValues(self.keys, self.values)


class CudaPrompt(LayerCache):
    """A layer of a prompt's own cache, of one row. Later reads of the buffers see what is written.

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
        held = KeysValues(self.keys, self.values)
        column = (stop - keys.shape[2]) % columns
        # NOTE: launch it now. Within one CUDA graph it might run in parallel with what reads it.
        mx.async_eval(cuda_rows.put(held, KeysValues(keys, values), rows.start, column))


def check(keys: mx.array, values: mx.array) -> None:
    """Raises ValueError if there is no kernel for the shape or type of keys and values."""
    alike = keys.shape == values.shape and keys.dtype == values.dtype
    if not alike or keys.dtype not in DTYPES or keys.shape[3] not in HEAD_DIMS:
        raise ValueError(f"no kernel for keys {keys.shape} and values {values.shape}")
