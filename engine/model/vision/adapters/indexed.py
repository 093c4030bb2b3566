"""Layers that choose keys by an indexer, which caches keys of its own.

Both caches attend fully, so a row's tokens are in the columns of their positions, and blocks of
columns are blocks of positions in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from chairlift.cache.layer import LayerCache


class IndexedLayer:
    """A layer's keys and values, and those of its indexer, as one cache of mlx-vlm."""

    def __init__(self, layer: LayerCache, index: LayerCache) -> None:
        self._layer = layer
        self._index = index
        self.offset = layer.offset
        self.make_mask = layer.make_mask
        # The indexer's writes. The hidden states depend on it, even if no key is chosen yet, so
        # that each step computes it.
        self.written: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See ``LayerCache.update_and_fetch``."""
        keys, values = self._layer.update_and_fetch(keys, values)
        return mx.depends(keys, self.written) if self.written else keys, values

    def update_index(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As ``update_and_fetch``, for the indexer."""
        self.written = list(self._index.update_and_fetch(keys, values))
        return self.written[0], self.written[1]


def empty_caches(is_indexed: Sequence[bool]) -> list[Any]:
    """The caches of layers that attend fully, of which some have an indexer."""
    return [CacheList(KVCache(), KVCache()) if indexed else KVCache() for indexed in is_indexed]


def with_indexers(layers: Sequence[Any], kind: type[IndexedLayer]) -> list[Any]:
    """A step's layers, in which those with an indexer are ``kind``."""
    return [kind(*layer.caches) if type(layer) is CacheList else layer for layer in layers]
