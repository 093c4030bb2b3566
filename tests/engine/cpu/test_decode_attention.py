"""A decode step of attention on the host is that of the layer it stands in for."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model
from mlx_lm.models import llama, qwen3

from chairlift.cache.kinds import make_batch
from chairlift.engine.cpu import bf16_linear, bf16_matmul, kernels
from chairlift.engine.cpu import decode_attention as host_attention

pytestmark = pytest.mark.skipif(
    not bf16_matmul.available(), reason="this CPU has no units for bfloat16, or no MKL is loaded"
)


@pytest.fixture(autouse=True)
def _any_layer_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_linear, "MIN_WEIGHTS", 0)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "ministral3"])
def test_rows_decode_as_before(name: str) -> None:
    """Rows of several lengths, through growth and round the ring; some layers are left alone."""
    ours, theirs = _model(name), _model(name)
    host_attention.install(ours)
    expected = _decode(theirs)
    for one, other in zip(_decode(ours), expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-4 * mx.abs(other).max().item())


def test_layers_like_llamas_are_taken_over_and_others_are_not() -> None:
    model, other = _model("llama"), _model("qwen3")
    for each in (model, other):
        host_attention.install(each)
    assert all(type(layer.self_attn) is not llama.Attention for layer in model.layers)
    assert all(type(layer.self_attn) is qwen3.Attention for layer in other.layers)


def test_a_layer_that_does_something_else_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs: Any = llama.Attention.__call__

    def other(*args: Any, **more: Any) -> mx.array:
        doubled: mx.array = 2 * theirs(*args, **more)
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
