"""Products of few tokens are as exact as in float32, with every backend."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.weights import tiny_model
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.cpu import host_linear, host_mlp
from chairlift.engine.cpu.matrix import Backend, apart
from chairlift.engine.device import memory

# The relative error of a sum of terms that are added in float32, in any order.
TOLERANCE = 2.0**-21


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 16, 65, 500])
@pytest.mark.parametrize("outputs", [[192], [576, 192, 192], [1000]])
@pytest.mark.parametrize("inputs", [576, 70, 2500])
def test_products_are_as_exact_as_in_float32(
    backend: Backend, tokens: int, outputs: list[int], inputs: int
) -> None:
    weights = [_weight(count, inputs, seed) for seed, count in enumerate(outputs)]
    x = np.random.default_rng(1).normal(size=(tokens, inputs)).astype(np.float32)
    matrix = backend.make(weights)
    parts = apart(matrix(x), matrix.stops)
    for part, weight in zip(parts, weights, strict=True):
        exact = np.array(weight.astype(mx.float32)).astype(np.float64).T
        terms = np.abs(x) @ np.abs(exact)
        assert np.all(np.abs(part - x.astype(np.float64) @ exact) <= TOLERANCE * terms)


def test_a_tokens_product_does_not_depend_on_the_batch(backend: Backend) -> None:
    if backend.name == "BLAS":
        pytest.skip("a BLAS computes one token in another order than several")
    matrix = backend.make([_weight(576, 1536, 0)])
    x = np.random.default_rng(2).normal(size=(520, 1536)).astype(np.float32)
    alone = matrix(x[7:8]).copy()
    for tokens in (8, 16, 33, 64, 65, 100, 520):
        assert np.array_equal(matrix(x[:tokens])[7:8], alone)


def test_weights_that_are_no_bfloat16_numbers_are_exact_or_left_to_mlx(backend: Backend) -> None:
    model = _llama()
    lossless = model.layers[0].mlp.up_proj
    lossless.weight = lossless.weight.astype(mx.bfloat16).astype(mx.float32)
    other = model.layers[1].mlp.up_proj
    weight = mx.array(np.array(other.weight))
    assert host_linear.install(model, exactly=True)
    assert type(lossless) is host_linear.HostLinear
    assert type(other) is (nn.Linear if backend.needs_bf16 else host_linear.HostLinear)
    assert mx.array_equal(other.weight, weight).item()
    x = mx.random.normal((1, 3, weight.shape[1]), key=mx.random.key(5))
    assert mx.allclose(other(x), x @ weight.T, rtol=1e-4, atol=1e-5).item()
    # A step that computes only embeddings calls the output layer with no tokens.
    assert lossless(mx.zeros((1, 0, lossless.weight.shape[1]))).shape == (1, 0, weight.shape[0])


def test_without_memory_for_a_copy_only_layers_without_one_are_replaced(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 20)
    model = _llama()
    weight = mx.array(np.array(model.layers[0].mlp.up_proj.weight))
    copies = any(backend.copy_bytes)
    assert host_linear.install(model, exactly=False) is not copies
    layer = model.layers[0].mlp.up_proj
    assert type(layer) is (nn.Linear if copies else host_linear.HostLinear)
    assert mx.array_equal(layer.weight, weight).item()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [3, 70])
def test_a_converted_model_equals_the_model_with_rounded_weights(
    backend: Backend, tied: bool, bias: bool, tokens: int
) -> None:
    model, reference = _llama(tied, bias), _llama(tied, bias)
    reference.apply(lambda array: array.astype(mx.bfloat16).astype(mx.float32))
    model.update(reference.parameters())
    assert host_linear.install(model, exactly=False)
    inputs = mx.random.randint(0, 512, (2, tokens), key=mx.random.key(3))
    difference = mx.abs(model(inputs) - reference(inputs)).max() / mx.abs(reference(inputs)).max()
    assert difference.item() < 1e-4


def test_an_mlp_is_fused_around_swiglu_but_not_around_another_activation(backend: Backend) -> None:
    model = _llama()
    other = model.layers[1].mlp

    class Squared(llama.MLP):  # type: ignore[misc, name-defined]
        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = self.down_proj(nn.relu2(self.gate_proj(x)) * self.up_proj(x))
            return result

    other.__class__ = Squared

    class UpFirst(llama.MLP):  # type: ignore[misc, name-defined]
        def __call__(self, x: mx.array) -> mx.array:
            up = self.up_proj(x)
            result: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * up)
            return result

    model.layers[0].mlp.__class__ = UpFirst
    x = mx.random.normal((1, 5, 256), key=mx.random.key(1))
    expected = other(x)
    assert host_linear.install(model, exactly=False)
    host_mlp.install(model)
    assert type(other) is Squared
    assert type(model.layers[0].mlp) is not UpFirst
    assert mx.allclose(other(x), expected, rtol=0.05, atol=0.02).item()


def _exact(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu(gate) * up


def _clamped(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(mx.minimum(gate, 7)) * up


def _approximate(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * up


@pytest.mark.parametrize("activation", [_exact, _clamped, _approximate])
@pytest.mark.parametrize("size", [0.02, 1.0])
def test_an_mlp_with_a_similar_activation_computes_the_same(
    backend: Backend, activation: Callable[[mx.array, mx.array], mx.array], size: float
) -> None:
    """Gemma's first models use the exact GELU; some models clamp; some have small weights."""

    class Similar(llama.MLP):  # type: ignore[misc, name-defined]
        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = self.down_proj(activation(self.gate_proj(x), self.up_proj(x)))
            return result

    model = _llama()
    mlp = model.layers[0].mlp
    mlp.__class__ = Similar
    mlp.update(tree_map(lambda weight: _rounded(weight * size), mlp.parameters()))
    x = 20 * mx.random.normal((1, 5, 256), key=mx.random.key(1))
    expected = mlp(x)
    assert host_linear.install(model, exactly=True)
    host_mlp.install(model)
    assert mx.abs(mlp(x) - expected).max().item() < 1e-5 * mx.abs(expected).max().item()


def _rounded(weight: mx.array) -> mx.array:
    return weight.astype(mx.bfloat16).astype(mx.float32)


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "deepseek_v3", "mamba2", "qwen3_next"])
def test_other_architectures_can_be_converted(
    backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)
    model = tiny_model(name)
    model.apply(lambda array: array.astype(mx.bfloat16).astype(mx.float32))
    tokens = mx.array([[1, 5, 2, 7, 3]])
    expected = model(tokens, cache=make_prompt_cache(model))
    assert host_linear.install(model, exactly=True)
    difference = mx.abs(model(tokens, cache=make_prompt_cache(model)) - expected).max()
    assert difference.item() < 1e-3 * mx.abs(expected).max().item()


def test_a_model_without_large_layers_is_not_converted(backend: Backend) -> None:
    model = _llama(width=64)
    assert not host_linear.install(model, exactly=False)


def _weight(outputs: int, inputs: int, seed: int) -> mx.array:
    """Of bfloat16 numbers, in float32."""
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(seed))
    weight = weight.astype(mx.bfloat16).astype(mx.float32)
    mx.eval(weight)
    return weight


def _llama(tied: bool = True, bias: bool = False, width: int = 256) -> llama.Model:
    mx.random.seed(0)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=width,
        num_hidden_layers=2,
        intermediate_size=2 * width,
        num_attention_heads=4,
        rms_norm_eps=1e-5,
        vocab_size=512,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
    )
    return llama.Model(arguments)
