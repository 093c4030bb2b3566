"""Builds the batch cache that a model needs, from the caches it would make for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from chairlift.cache.batch import BatchCache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.kernels import PageKernels
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.quantized import Quantization, Storage
from chairlift.cache.snapshot import LayerKind

# The caches of decode rows or of a prompt.
Cache = BatchCache | PagedBatch

SUPPORTED = ("KVCache", "RotatingKVCache", "ChunkedKVCache", "ArraysCache", "CacheList")

# Model files of mlx-lm whose attention scores have an axis for the query heads of a key head and
# that add the mask unchanged.
GROUPED_MASKS = frozenset({"gemma2"})


class UnsupportedKind(Exception):
    """A model needs a kind of cache that cannot be batched; the message names it."""


def make_batch(model: Any, storage: Storage | None = None) -> BatchCache:
    """An empty batch of the layers that ``model`` needs.

    NOTE: a model file that assumes a single sequence has to be adapted first
    (``engine.model.adapters``), or it may silently compute wrong results.

    Raises:
        UnsupportedKind: a layer needs another kind of cache, or attention-sink tokens.
    """
    caches = _model_caches(model)
    kinds = [_kind(cache) for cache in _flat(caches)]
    return BatchCache(
        kinds,
        storage,
        lambda layers: _nested(caches, iter(layers)),
        grouped_masks=_groups_masks(model),
    )


def make_pages(
    model: Any,
    kernels: PageKernels,
    pages: Mapping[int | None, int],
    quantization: Quantization | None = None,
) -> PagedMemory:
    """The memory of the paged caches that ``model`` needs, with ``pages`` by window.

    Raises:
        UnsupportedKind: see ``make_batch``.
    """
    caches = _model_caches(model)
    kinds = [_kind(cache) for cache in _flat(caches)]
    return PagedMemory(
        *(kinds, pages, kernels, lambda layers: _nested(caches, iter(layers)), quantization),
        grouped_masks=_groups_masks(model),
    )


def _groups_masks(model: Any) -> bool:
    return type(model).__module__.rpartition(".")[2] in GROUPED_MASKS


def _model_caches(model: Any) -> Sequence[Any]:
    """The caches that the model would make for itself, or its ``make_row_caches``."""
    make = getattr(model, "make_row_caches", None)
    caches: Sequence[Any] = make() if make else make_prompt_cache(model)
    return caches


def _kind(cache: Any) -> LayerKind:
    # By exact type: a subclass may keep more than our layers would.
    if type(cache) is KVCache:
        return LayerKind()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return LayerKind(window=cache.max_size)
    if type(cache) is ChunkedKVCache:
        return LayerKind(window=cache.chunk_size, chunked=True)
    if type(cache) is ArraysCache:
        return LayerKind(recurrent=True, slots=len(cache.cache))
    sink_tokens = getattr(cache, "keep", 0)
    detail = f" with {sink_tokens} tokens kept for good" if sink_tokens else ""
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


def _nested(caches: Sequence[Any], layers: Iterator[Any]) -> list[Any]:
    return [
        CacheList(*_nested(cache.caches, layers)) if type(cache) is CacheList else next(layers)
        for cache in caches
    ]
