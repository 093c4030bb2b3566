"""Batches without a model, and tokens that NumPy writes to them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from support.engine.kv import tokens_to_kv

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.snapshot import LayerKind

FULL = LayerKind()


def filled(kinds: list[LayerKind], lengths: list[int]) -> BatchCache:
    """A batch whose rows have these lengths; the tokens of row r are 1000 * r + position."""
    batch = BatchCache(kinds)
    for row, length in enumerate(lengths):
        single = BatchCache(kinds)
        single.join()
        with single.step(length):
            for layer in single.layers:
                layer.update_and_fetch(*tokens_to_kv(row * 1000 + np.arange(length)[None]))
        batch.join(single.extract(0))
        mx.eval(batch.take_moves())
    return batch


def written(layer: LayerCache, keys: Any, values: Any, counts: list[int]) -> bool:
    """Whether the host could write the tokens, and did."""
    places = layer.host_places(counts, keys.dtype)
    if places is not None:
        places.write(keys, values)
    return places is not None
