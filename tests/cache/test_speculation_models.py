"""Speculation on tiny models: rows get their solo tokens and logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.engine.reference import solo_tokens
from support.tiny import tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.cache.snapshot import Snapshot
from chairlift.cache.speculation import Speculation

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": lambda seed: tiny_model("llama", seed),
    "gemma3": lambda seed: tiny_model("gemma3", seed),
    "gemma3, window 3": lambda seed: tiny_model("gemma3", seed, sliding_window=3),
    "lfm2": lambda seed: tiny_model("lfm2", seed),
}


def prefilled(model: nn.Module, tokens: Sequence[int]) -> Snapshot | None:
    batch = make_batch(model)
    batch.join()
    if not tokens:
        return None
    with batch.step(len(tokens)):
        model(mx.array([tokens]), cache=batch.layers)
    return batch.extract(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_random_drafts_give_the_solo_tokens(name: str) -> None:
    """A row keeps the token it was fed and the drafts that equal the model's greedy choices."""
    model, random_ = MODELS[name](1), random.Random(5)
    prompts = [[random_.randrange(3, 250) for _ in range(n)] for n in (1, 30, 7, 50)]
    counts = [20, 35, 28, 12]
    expected = [solo_tokens(model, p, n) for p, n in zip(prompts, counts, strict=True)]
    assert len({tuple(tokens[:3]) for tokens in expected}) > 1, (
        "the model always gives the same tokens"
    )
    batch = make_batch(model)
    speculation = Speculation(batch)
    waiting, rows, generated = list(range(len(prompts))), [], [[] for _ in prompts]
    while waiting or rows:
        if waiting and (not rows or random_.random() < 0.3):
            batch.join(prefilled(model, prompts[waiting[0]][:-1]))
            rows.append(waiting.pop(0))
        length = random_.choice([1, 3, 5])
        fed = []
        for r in rows:
            following = (expected[r] + [0] * length)[len(generated[r]) :][: length - 1]
            drafts = [t if random_.random() < 0.7 else random_.randrange(250) for t in following]
            fed.append([(generated[r] or prompts[r])[-1], *drafts])
        chosen = greedy_choices(speculation, model, fed, length)
        kept = []
        for tokens, choices, r in zip(fed, chosen, rows, strict=True):
            right = [d == c for d, c in zip(tokens[1:], choices, strict=False)]
            kept.append(1 + [*right, False].index(False))
            generated[r] += choices[: kept[-1]]
        tokens = mx.array(fed)
        speculation.commit(kept, lambda a, b, t=tokens: model(t[:, a:b], cache=speculation.layers))
        order = batch.leave({i for i, r in enumerate(rows) if len(generated[r]) >= counts[r]})
        rows = [rows[i] for i in order]
        batch.check_integrity()
    assert [tokens[:n] for tokens, n in zip(generated, counts, strict=True)] == expected


def greedy_choices(
    speculation: Speculation, model: nn.Module, fed: list[list[int]], length: int
) -> list[list[int]]:
    with speculation.step(length):
        logits = model(mx.array(fed), cache=speculation.layers)
    return mx.argmax(logits, axis=-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_next_logits_equal_those_after_single_steps(name: str) -> None:
    model, random_ = MODELS[name](2), random.Random(2)
    prompts = [[random_.randrange(3, 250) for _ in range(n)] for n in (3, 14, 40)]
    batch, solos = make_batch(model), [make_batch(model) for _ in prompts]
    for prompt, solo in zip(prompts, solos, strict=True):
        state = prefilled(model, prompt)
        batch.join(state)
        solo.join(state)
    speculation = Speculation(batch)
    for kept in ([0, 2, 6], [6, 6, 6], [4, 0, 0], [1, 3, 5]):
        tokens = np.array([[random_.randrange(3, 250) for _ in range(6)] for _ in prompts])
        fed = mx.array(tokens)
        with speculation.step(6):
            model(fed, cache=batch.layers)
        speculation.commit(kept, lambda a, b, t=fed: model(t[:, a:b], cache=batch.layers))
        for solo, row, n in zip(solos, tokens.tolist(), kept, strict=True):
            for token in row[:n]:
                decode(model, solo, [token])
        following = [random_.randrange(3, 250) for _ in prompts]
        logits = decode(model, batch, following)
        for r, (solo, token) in enumerate(zip(solos, following, strict=True)):
            assert mx.allclose(logits[r], decode(model, solo, [token])[0], 1e-5, 1e-5)


def decode(model: nn.Module, batch: BatchCache, tokens: list[int]) -> mx.array:
    with batch.step(1):
        logits = model(mx.array(tokens)[:, None], cache=batch.layers)[:, -1]
    mx.eval(logits, batch.state)
    return logits
