"""The engine on the default model: batched tokens equal the solo tokens."""

from __future__ import annotations

import random

import pytest
from mlx_lm.models import llama
from support.engine.bench import Bench
from support.engine.reference import solo_tokens
from support.models import default_model_path

from chairlift.engine.cpu import kernels
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model

pytestmark = pytest.mark.system


def test_batched_tokens_are_the_solo_tokens_of_the_default_model() -> None:
    loaded = load_model(ModelSource("default", "gguf", default_model_path()), "float32")
    random_ = random.Random(3)
    prompts = [
        [random_.randrange(100, 40_000) for _ in range(random_.choice([4, 30, 60]))]
        for _ in range(4)
    ]
    # The reference runs mlx-lm's own attention and activation, the batch the engine's.
    before = llama.swiglu, llama.scaled_dot_product_attention
    kernels.install(loaded.model)
    try:
        bench = Bench(loaded.model, tokens=72)
        for i, prompt in enumerate(prompts):
            bench.submit(str(i), prompt, 8)
            bench.step()
        bench.drain()
    finally:
        llama.swiglu, llama.scaled_dot_product_attention = before
    for i, prompt in enumerate(prompts):
        tokens = bench.tokens(str(i))
        assert tokens == solo_tokens(loaded.model, prompt, 8, tokens)
