"""mlx-lm's own computation of one sequence: the reference for batched results."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache


def solo_tokens(model: Any, prompt: Seq[int], count: int) -> list[int]:
    """The ``count`` greedy tokens after ``prompt``, computed alone with mlx-lm's caches."""
    cache = make_prompt_cache(model)
    tokens: list[mx.array] = []
    inputs = mx.array([list(prompt)])
    for _ in range(count):
        chosen = mx.argmax(model(inputs, cache=cache)[:, -1], axis=-1)
        mx.async_eval(chosen)
        tokens.append(chosen)
        inputs = chosen[None]
    return [int(token.item()) for token in tokens]


def solo_logprobs(model: Any, prompt: Seq[int]) -> mx.array:
    """Logprobs ``[tokens - 1, vocabulary]`` after each token of ``prompt`` but the last."""
    logits = model(mx.array([list(prompt)]))[0, :-1].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def solo_hidden(model: Any, prompt: Seq[int]) -> mx.array:
    """Hidden states ``[tokens, hidden size]`` before the output layer of a plain mlx-lm model."""
    return model.model(mx.array([list(prompt)]))[0].astype(mx.float32)
