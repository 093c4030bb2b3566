"""Which caches a model wants, read from the ones it would make for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from chairlift.cache.batch import BatchCache, Layer
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import LayerKind

SUPPORTED = ("KVCache", "RotatingKVCache", "ArraysCache", "CacheList")

# mlx-lm's model files whose attention scores have an axis for the query heads of a key head, and
# that add the mask as it comes.
GROUPED_MASKS = frozenset({"gemma2"})
# Model files that take for granted what holds only for a single sequence, and would go wrong
# without a word.
UNBATCHED = {
    "afm7": "layers that reuse keys take a query's position from how many there are",
    "minimax_m3_vl": "it selects blocks of cache columns, which differ from row to row",
    "recurrent_gemma": "it scales the first token by whether the state is None, for all rows alike",
}


class UnsupportedKind(Exception):
    """A model wants a kind of cache that cannot be batched yet; names it."""


def layer_kinds(model: Any) -> list[LayerKind]:
    """What each layer keeps, those inside a CacheList one by one.

    Raises:
        UnsupportedKind: a layer wants another kind of cache, or attention-sink tokens.
    """
    return [_kind(cache) for cache in _flat(make_prompt_cache(model))]


def make_batch(model: Any, quantization: Quantization | None = None) -> BatchCache:
    """An empty batch of the layers that ``model`` wants. Raises UnsupportedKind."""
    caches = make_prompt_cache(model)
    kinds = [_kind(cache) for cache in _flat(caches)]
    name = type(model).__module__.rpartition(".")[2]
    if name in UNBATCHED:
        raise UnsupportedKind(UNBATCHED[name])
    return BatchCache(
        kinds,
        quantization,
        lambda layers: _nested(caches, iter(layers)),
        grouped_masks=name in GROUPED_MASKS,
    )


def _kind(cache: Any) -> LayerKind:
    # By exact type: a subclass may keep something that ours would lose.
    if type(cache) is KVCache:
        return LayerKind()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return LayerKind(window=cache.max_size)
    if type(cache) is ArraysCache:
        return LayerKind(recurrent=True, slots=len(cache.cache))
    kept = getattr(cache, "keep", 0)
    detail = f" with {kept} tokens kept for good" if kept else ""
    raise UnsupportedKind(
        f"cache kind {type(cache).__name__}{detail} is not supported yet "
        f"(supported: {', '.join(SUPPORTED)})"
    )


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _flat(cache.caches)
        else:
            yield cache


def _nested(caches: Sequence[Any], layers: Iterator[Layer]) -> list[Any]:
    return [
        CacheList(*_nested(cache.caches, layers)) if type(cache) is CacheList else next(layers)
        for cache in caches
    ]
