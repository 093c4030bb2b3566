"""Decode attention on the host equals the attention layer that it replaces."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model
from mlx_lm.models import llama, qwen3

from chairlift.cache.kinds import make_batch
from chairlift.engine.cpu import decode_attention as host_attention
from chairlift.engine.cpu import host_linear, kernels
from chairlift.engine.cpu.matrix import Backend


@pytest.fixture(autouse=True)
def _replace_layers_of_any_size(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "ministral3"])
def test_decoded_logits_are_unchanged(name: str) -> None:
    """For rows of several lengths, while buffers grow and wrap; some layers are not replaced."""
    replaced, plain = _model(name), _model(name)
    host_attention.install(replaced)
    expected = _decode(plain)
    for one, other in zip(_decode(replaced), expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-4 * mx.abs(other).max().item())


def test_only_layers_like_llamas_are_replaced() -> None:
    model, other = _model("llama"), _model("qwen3")
    for each in (model, other):
        host_attention.install(each)
    assert all(type(layer.self_attn) is not llama.Attention for layer in model.layers)
    assert all(type(layer.self_attn) is qwen3.Attention for layer in other.layers)


def test_a_layer_with_a_different_result_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original: Any = llama.Attention.__call__

    def other(*args: Any, **more: Any) -> mx.array:
        doubled: mx.array = 2 * original(*args, **more)
        return doubled

    monkeypatch.setattr(llama.Attention, "__call__", other)
    model = _model("llama")
    host_attention.install(model)
    assert all(type(layer.self_attn) is llama.Attention for layer in model.layers)


def _model(name: str) -> Any:
    model = tiny_model(name)
    kernels.install(model, exactly=False)
    return model


def _decode(model: Any) -> list[mx.array]:
    make = partial(make_batch, model)
    batch = make()
    for length in (3, 9, 1):
        prompt = make()
        prompt.join(columns=length)
        with prompt.step(length):
            model(mx.arange(1, length + 1)[None], cache=prompt.layers)
        mx.eval(prompt.state)
        batch.join(prompt.extract(0))
    results = []
    for step in range(40):
        with batch.step(1):
            results.append(model(mx.full((len(batch), 1), step % 7), cache=batch.layers))
        mx.eval(results[-1], batch.state)
        if step == 25:
            batch.leave({0})
            mx.eval(batch.take_moves())
    return results
