"""Keys and values that hold their token's number, and caches of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.cache.quantized import Storage

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def tokens_to_kv(tokens: np.ndarray) -> tuple[mx.array, mx.array]:
    """Keys and values ``[rows, heads, length, dim]`` that hold their token's number.

    Args:
        tokens: ``[rows, length]``.
    """
    base = mx.array(tokens.astype(np.float32))[:, None, :, None]
    heads = mx.arange(HEADS)[None, :, None, None] * 0.25
    return (
        mx.broadcast_to(base + heads, (*base.shape[:1], HEADS, base.shape[2], KEY_DIM)),
        mx.broadcast_to(-base - heads, (*base.shape[:1], HEADS, base.shape[2], VALUE_DIM)),
    )


def filled_batch(model: Any, lengths: Sequence[int], storage: Storage | None = None) -> BatchCache:
    """The model's caches of rows with prompts of these lengths."""
    make = partial(make_batch, model, storage)
    batch = make()
    for length in lengths:
        prompt = make()
        prompt.join(columns=length)
        with prompt.step(length):
            model(mx.arange(1, length + 1)[None] % 20, cache=prompt.layers)
        mx.eval(prompt.state)
        batch.join(prompt.extract(0))
    return batch
