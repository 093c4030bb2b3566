"""Decode on the host equals the attention and decoder layers that it replaces."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from conformance.configs import tiny_args
from conformance.weights import tiny_model
from mlx_lm.models import llama
from support.engine.kv import filled_batch

from chairlift.cache.packed.step import BatchStep, packed
from chairlift.cache.speculation import Speculation
from chairlift.engine.cpu import host_linear, kernels
from chairlift.engine.cpu.decoder import install as decoder
from chairlift.engine.cpu.decoder.stack import decode_logits
from chairlift.engine.cpu.matrix import Backend

LENGTHS = (3, 9, 1)


@pytest.fixture(autouse=True)
def _replace_layers_of_any_size(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "qwen2", "qwen3", "gemma3_text", "ministral3"]
)
def test_decoded_logits_are_unchanged(name: str) -> None:
    """For rows of several lengths, while buffers grow and wrap; some layers are not replaced."""
    replaced, plain = _model(name), _model(name)
    decoder.install(replaced)
    expected = _decode(plain)
    for one, other in zip(_decode(replaced), expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-4 * mx.abs(other).max().item())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_whole_decoder_layers_are_replaced(name: str) -> None:
    model = _model(name)
    attention, block = type(model.layers[0].self_attn), type(model.layers[0])
    decoder.install(model)
    assert all(type(layer.self_attn) is not attention for layer in model.layers)
    assert all(type(layer) is not block for layer in model.layers)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "ministral3"])
def test_rows_with_drafts_of_any_lengths_are_unchanged(name: str, dim: int) -> None:
    """With the compiled attention and without it, in layers with windows and without."""
    module, args = tiny_args(name)
    args.head_dim = dim
    mx.random.seed(1)
    plain = module.Model(args)
    mx.eval(plain.parameters())
    replaced = module.Model(args)
    replaced.update(plain.parameters())
    kernels.install(replaced, exactly=True)
    decoder.install(replaced)
    ours, theirs = filled_batch(replaced, LENGTHS), filled_batch(plain, LENGTHS)
    rng = random.Random(dim)
    for _ in range(8):
        counts = [rng.choice([1, 1, 2, 5, 17]) for _ in range(len(ours))]
        length, drafts = max(counts), (Speculation(ours), Speculation(theirs))
        tokens = [[rng.randrange(1, 20) for _ in range(length)] for _ in counts]
        taken = [(row, i) for row, count in enumerate(counts) for i in range(count)]
        fed = mx.array([[tokens[row][i]] for row, i in taken])
        with packed([BatchStep(ours, counts, counts, drafts[0].step)]) as layers:
            logits = replaced(fed, cache=layers)[:, 0]
            mx.eval(logits)
        with drafts[1].step(length, counts):
            expected = plain(mx.array(tokens), cache=drafts[1].layers)
            mx.eval(expected)
        kept = [rng.randint(1, count) for count in counts]
        theirs_of_taken = mx.stack([expected[place] for place in taken])
        assert mx.allclose(logits, theirs_of_taken, rtol=1e-3, atol=1e-4)
        for draft in drafts:
            draft.commit(kept)


@pytest.mark.parametrize("name", ["gemma2", "gear"])
def test_attention_that_caps_its_scores_is_not_replaced(name: str) -> None:
    model = _model(name)
    found = [layer.self_attn for layer in model.layers if "self_attn" in layer]
    attention = type(found[0])
    decoder.install(model)
    assert all(type(layer) is attention for layer in found)


def test_a_decoder_layer_with_a_different_sum_keeps_that_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        middle = x + 0.5 * self.self_attn(self.input_layernorm(x), mask, cache)
        result: mx.array = middle + self.mlp(self.post_attention_layernorm(middle))
        return result

    monkeypatch.setattr(llama.TransformerBlock, "__call__", other)
    model = _model("llama")
    expected = decode_logits(model)
    decoder.install(model)
    assert all(type(layer.self_attn) is not llama.Attention for layer in model.layers)
    assert not any(hasattr(layer, "host") for layer in model.layers)
    assert mx.allclose(decode_logits(model), expected, rtol=1e-4, atol=1e-5).item()


def test_a_layer_with_a_different_result_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original: Any = llama.Attention.__call__

    def other(*args: Any, **more: Any) -> mx.array:
        doubled: mx.array = 2 * original(*args, **more)
        return doubled

    monkeypatch.setattr(llama.Attention, "__call__", other)
    model = _model("llama")
    decoder.install(model)
    assert all(type(layer.self_attn) is llama.Attention for layer in model.layers)


def _model(name: str) -> Any:
    model = tiny_model(name)
    kernels.install(model, exactly=False)
    return model


def _decode(model: Any) -> list[mx.array]:
    batch = filled_batch(model, LENGTHS)
    results = []
    for step in range(26):
        with batch.step(1):
            results.append(model(mx.full((len(batch), 1), step % 7), cache=batch.layers))
        mx.eval(results[-1], batch.state)
        if step == 17:
            batch.leave({0})
            mx.eval(batch.take_moves())
    return results
