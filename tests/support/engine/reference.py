"""mlx-lm's own computation of one sequence: the reference for batched results."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache


def solo_tokens(model: Any, prompt: Seq[int], count: int, guess: Seq[int] = ()) -> list[int]:
    """The ``count`` greedy tokens after ``prompt``, computed alone with mlx-lm's caches.

    Args:
        guess: may begin like them, as the tokens under test do; one call of the model then computes
            all that follow right ones.
    """
    cache = make_prompt_cache(model)
    guess = list(guess[: count - 1])
    logits = model(mx.array([[*prompt, *guess]]), cache=cache)[0, len(prompt) - 1 :]
    after: Any = mx.argmax(logits, axis=-1).tolist()
    right = next((i for i, token in enumerate(guess) if token != after[i]), len(guess))
    found: list[int] = after[: right + 1]
    if right < len(guess):
        return solo_tokens(model, prompt, count, found)
    tokens = [mx.array([found[-1]])]
    for _ in range(count - len(found)):
        chosen = mx.argmax(model(tokens[-1][None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(chosen)
        tokens.append(chosen)
    return [*found, *(int(token.item()) for token in tokens[1:])]


def solo_logprobs(model: Any, prompt: Seq[int]) -> mx.array:
    """Logprobs ``[tokens - 1, vocabulary]`` after each token of ``prompt`` but the last."""
    logits = model(mx.array([list(prompt)]))[0, :-1].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def solo_hidden(model: Any, prompt: Seq[int]) -> mx.array:
    """Hidden states ``[tokens, hidden size]`` before the output layer of a plain mlx-lm model."""
    return model.model(mx.array([list(prompt)]))[0].astype(mx.float32)


def logits_of_prompt(model: Any, count: int, last: int) -> mx.array:
    """The logits of ``count`` tokens, of which the ``last`` ones are a model call of their own."""
    tokens = mx.array([[3 + number * 7 % 60 for number in range(count)]])
    cache = make_prompt_cache(model)
    cut = count - last
    parts = [model(tokens[:, part], cache=cache) for part in (slice(cut), slice(cut, None))]
    mx.eval(parts)
    return mx.concatenate(parts, axis=1)
