"""Which caches a model wants, read from the ones it would make for itself."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from chairlift.cache.batch import BatchCache

SUPPORTED = ("KVCache", "RotatingKVCache")


class UnsupportedKind(Exception):
    """A model wants a kind of cache that cannot be batched yet; names it."""


def layer_windows(model: Any) -> list[int | None]:
    """Each layer's sliding window in tokens, None for full attention.

    Raises:
        UnsupportedKind: a layer wants another kind of cache, or attention-sink tokens.
    """
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        # By exact type: a subclass may keep something that a ring would lose.
        if type(cache) is KVCache:
            windows.append(None)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            windows.append(cache.max_size)
        else:
            kept = getattr(cache, "keep", 0)
            detail = f" with {kept} tokens kept for good" if kept else ""
            raise UnsupportedKind(
                f"cache kind {type(cache).__name__}{detail} is not supported yet "
                f"(supported: {', '.join(SUPPORTED)})"
            )
    return windows


def make_batch(model: Any) -> BatchCache:
    """An empty batch of the layers that ``model`` wants. Raises UnsupportedKind."""
    return BatchCache(layer_windows(model))
