"""MLX's cache of freed buffers."""

from __future__ import annotations

import mlx.core as mx

# The cache counts as full above this share of its limit, and is emptied at most once in so many
# steps, because allocating all buffers of a step again takes milliseconds. So does each step with a
# full cache, so that it must not stay full for long.
FULL = 0.9
MIN_STEPS = 32


class BufferCache:
    """Freed buffers, which MLX keeps for later results of nearly the same size.

    MLX drops none of them for a newer one. In a cache that is full of sizes that no longer recur,
    it would find no buffer for any operation, and allocate and free memory each time.

    Args:
        max_bytes: bytes of buffers that MLX may keep.
    """

    def __init__(self, max_bytes: int) -> None:
        mx.set_cache_limit(max_bytes)
        self._max_bytes = max_bytes
        self._steps = MIN_STEPS

    def trim(self) -> None:
        """Empties the cache if it is full. Call it once a step."""
        self._steps += 1
        if self._steps >= MIN_STEPS and mx.get_cache_memory() > FULL * self._max_bytes:
            mx.clear_cache()
            self._steps = 0
