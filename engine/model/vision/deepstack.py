"""Embeddings that images add after the first layers of Qwen3-VL's models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def add_at_places(model: Any) -> None:
    """Lets a model take the places of images' tokens instead of a mask for each row.

    mlx-vlm's method looks for them in one row after the other, in Python, and packed calls have a
    row for each token.
    """
    base: Any = type(model)

    def process(model: Any, hidden: mx.array, places: mx.array, embeds: mx.array) -> mx.array:
        if places.dtype == mx.bool_:
            result: mx.array = base._deepstack_process(model, hidden, places, embeds)
            return result
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat.at[places].add(embeds.astype(flat.dtype)).reshape(hidden.shape)

    model.__class__ = type(base.__name__, (base,), {"_deepstack_process": process})
