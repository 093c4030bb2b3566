"""Layers on CUDA whose buffers our kernels write to where they are.

Seen from MLX such buffers never change: they only ever go into operations. So nothing copies them,
whoever holds them, and a step can be launched while the one before still runs. What keeps reads and
writes in order is the device's queue: everything that reads or writes these buffers is launched in
the order in which it has to happen (see ``put``).
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
    """A layer of the decode batch: steps are of one token a row, and attention writes it.

    Raises:
        ValueError: keys and values are not of a form that the kernels know.
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
        """Nothing: the kernel reads no column that is not the row's own."""

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
        """What is held of all rows, once anything has been written."""
        assert self.keys is not None
        assert self.values is not None
        return KeysValues(self.keys, self.values)


class CudaPrompt(LayerCache):
    """A layer of a prompt's own cache, of one row: what is written is there for whoever reads the
    buffers from then on.

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
        # NOTE: launched here and now. Within one CUDA graph it might run beside what reads it.
        mx.async_eval(cuda_rows.put(held, KeysValues(keys, values), rows.start, column))


def check(keys: mx.array, values: mx.array) -> None:
    """Raises ValueError if keys and values are not of a form that the kernels know."""
    alike = keys.shape == values.shape and keys.dtype == values.dtype
    if not alike or keys.dtype not in DTYPES or keys.shape[3] not in HEAD_DIMS:
        raise ValueError(f"no kernel for keys {keys.shape} and values {values.shape}")
