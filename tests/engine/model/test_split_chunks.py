"""Chunks are computed in several model calls where a model file keeps all attention scores."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model as tiny_of_file
from mlx_lm.models import gemma2
from support.tiny import tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.engine.core.prepared_model import prepare_model
from chairlift.engine.model import attention
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.attention import score_heads
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.forward import Forward
from chairlift.engine.model.head import Head

# Model files with scores of their own: with a soft cap, as a mask, of an indexer, beside recurrent
# layers, in groups. (phi3small is left out: in mlx-lm, too, its logits depend on its chunks.)
FILES = ("gemma2", "deepseek_v3", "deepseek_v32", "jamba", "deepseek_v41")
NO_ROWS = mx.zeros((0,), mx.int32)


def _model(name: str) -> Any:
    model = tiny_of_file(name)
    adapt(model)
    attention.install(model)
    return model


def _prefill(model: Any, forward: Forward, seed: int, pooled: bool) -> list[mx.array]:
    """Logits and hidden states of a prompt in random chunks, and of the tokens that follow."""
    rng = random.Random(seed)
    cache: BatchCache = make_batch(model)
    cache.join(columns=64)
    prompt = [rng.randrange(3, 60) for _ in range(rng.randint(2, 40))]
    results: list[mx.array] = []
    while cache.offsets[0] < len(prompt):
        begun = cache.offsets[0]
        part = prompt[begun : begun + rng.randint(1, 30)]
        ends = begun + len(part) == len(prompt)
        scored = rng.choice([0, len(part) - ends, rng.randint(0, len(part) - ends)])
        outcome = forward([], NO_ROWS, [Chunk(cache, part, int(ends), scored, pooled)])
        results += [*outcome.scored.values(), *outcome.hidden.values()]
        assert [len(own) for own in outcome.scored.values()] == [scored] * bool(scored)
        assert [len(own) for own in outcome.hidden.values()] == [len(part)] * pooled
        if ends:
            assert outcome.logits is not None
            results.append(outcome.logits)
        mx.eval(results, cache.state)
    batch: BatchCache = make_batch(model)
    batch.join(cache.extract(0))
    for token in (7, 8, 9):
        logits = forward([batch], mx.array([token], mx.int32), []).logits
        assert logits is not None
        results.append(logits)
        mx.eval(batch.take_moves(), batch.state, logits)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_chunk_in_parts_has_the_results_of_one_call(name: str) -> None:
    model = _model(name)
    head = Head(model)
    for seed in range(2):
        pooled = seed % 2 == 1
        whole = _prefill(model, Forward(model, head, packs=False), seed, pooled)
        for max_pairs in (1, 100, 100_000):
            forward = Forward(model, head, packs=False, max_pairs=max_pairs)
            parts = _prefill(model, forward, seed, pooled)
            assert len(parts) == len(whole)
            for ours, theirs in zip(parts, whole, strict=True):
                assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3), (seed, max_pairs)


@pytest.mark.slow
def test_the_memory_of_scores_is_bounded_however_long_the_context_is() -> None:
    """Gemma 2 keeps the scores of each layer: 8 heads x 512 x 2,048 in float32 are 33 MB."""
    model = gemma2.Model(_gemma2_args())
    mx.eval(model.parameters())
    attention.install(model)
    assert score_heads(model) == 8
    tokens = [1 + i % 60 for i in range(2048)]
    peaks = []
    for score_bytes in (None, 2 << 20):
        prepared = prepare_model(model, 64, score_bytes=score_bytes)
        assert prepared.forward.splits
        cache = prepared.make_cache()
        cache.join(columns=2048)
        for begin in range(0, 2048, 512):
            chunk = Chunk(cache, tokens[begin : begin + 512], 0)
            mx.reset_peak_memory()
            active = mx.get_active_memory()
            prepared.forward([], NO_ROWS, [chunk])
            mx.eval(cache.state)
        peaks.append(mx.get_peak_memory() - active)
    # Several arrays of scores live at once: before, in and after the softmax.
    assert peaks[0] > 33e6
    assert peaks[1] < 5 * (2 << 20)


def _gemma2_args() -> gemma2.ModelArgs:
    return gemma2.ModelArgs.from_dict(
        {
            "model_type": "gemma2",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "num_attention_heads": 8,
            "head_dim": 4,
            "rms_norm_eps": 1e-6,
            "vocab_size": 64,
            "num_key_value_heads": 4,
        }
    )


def test_models_with_our_attention_take_a_chunk_at_once() -> None:
    model = tiny_model("llama")
    attention.install(model)
    assert prepare_model(model, 64, score_bytes=1).forward.packs
    assert score_heads(model) is None


@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "falcon_h1"])
def test_recurrent_models_with_plain_attention_take_a_chunk_at_once(name: str) -> None:
    assert score_heads(_model(name)) is None


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "kimi_linear", "gemma2", "gear"])
def test_layers_that_keep_their_scores_are_found(name: str) -> None:
    assert (score_heads(_model(name)) or 0) > 0
