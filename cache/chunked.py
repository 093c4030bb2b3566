"""Chunked attention: a query sees nothing before the last multiple of the chunk's length."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.cache.layer import LayerCache, Mask
from chairlift.cache.quantized import QuantizedLayer


class ChunkedLayer(LayerCache):
    """A window layer whose mask also hides the tokens of earlier chunks.

    The window is as long as a chunk. A query at position p sees positions ``p - p % chunk`` to p,
    so the number of columns that a row sees depends on its position in the chunk.
    """

    @property
    def _chunk(self) -> int:
        assert self.ring.window is not None
        return self.ring.window

    def _mask(self, n: int, window_size: int | None, return_array: bool) -> Mask:
        mask = self.ring.mask(n, window_size, return_array)
        starts: Any = self.offset.tolist()
        if max(starts, default=0) + n <= self._chunk:  # every row is in its first chunk
            return mask
        if not isinstance(mask, mx.array):
            mask = self.ring.mask(n, window_size, as_array=True)
            assert isinstance(mask, mx.array)
        in_chunk = (self.offset[:, None] + mx.arange(n)) % self._chunk
        return mask & (self.ring.behind(n) <= in_chunk[:, :, None])[:, None]


class QuantizedChunkedLayer(ChunkedLayer, QuantizedLayer):
    """A chunked layer with quantized keys and values."""
