"""mlx-lm's own single-sequence generation: what every batched result is compared with."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache


def solo_tokens(model: Any, prompt: Seq[int], count: int) -> list[int]:
    """The ``count`` greedy tokens after ``prompt``, computed alone with mlx-lm's caches."""
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    inputs = mx.array([list(prompt)])
    for _ in range(count):
        chosen = mx.argmax(model(inputs, cache=cache)[:, -1], axis=-1)
        tokens.append(int(chosen.item()))
        inputs = chosen[None]
    return tokens
