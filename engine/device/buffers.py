"""MLX's cache of freed buffers."""

from __future__ import annotations

import mlx.core as mx

# The cache counts as full above this share of its limit, and then keeps only so much of it. Not in
# each step, because allocating buffers again takes milliseconds; nor does it stay full for long,
# because each step with a full cache does so.
FULL, KEPT = 0.9, 0.5
MIN_STEPS = 16


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
        """Drops the buffers that were freed first if the cache is full. Call it once a step."""
        self._steps += 1
        if self._steps >= MIN_STEPS and mx.get_cache_memory() > FULL * self._max_bytes:
            mx.set_cache_limit(int(KEPT * self._max_bytes))
            mx.array(0.0)  # GPUs keep to a new limit when they next allocate anything
            mx.set_cache_limit(self._max_bytes)
            self._steps = 0
