"""Products of bfloat16 weights and float32 activations are as exact as in float32."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.weights import tiny_model
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.cpu import bf16_linear, bf16_matmul
from chairlift.engine.cpu.bf16_matmul import Matrix, _Workspace
from chairlift.engine.device import memory

has_units = pytest.mark.skipif(
    not bf16_matmul.available(), reason="this CPU has no units for bfloat16, or no MKL is loaded"
)
# The relative error of a sum of terms that are added in float32, in any order.
TOLERANCE = 2.0**-21


def test_three_bfloat16_pieces_sum_to_the_number() -> None:
    x = np.random.default_rng(0).normal(size=(300, 1000)).astype(np.float32)
    x[0, :4] = [0.0, -0.0, 1e30, 1e-30]
    high, middle, low = _pieces(x)
    assert np.array_equal(high + (middle + low), x)
    assert not np.array_equal(high + middle, x)


def test_infinity_stays_nonfinite() -> None:
    high, middle, low = _pieces(np.full((1, 2), np.inf, np.float32))
    assert not np.isfinite(high + (middle + low)).any()


@has_units
@pytest.mark.parametrize("tokens", [1, 16, 65, 500])
@pytest.mark.parametrize("outputs", [[192], [576, 192, 192], [1000]])
def test_products_are_as_exact_as_in_float32(tokens: int, outputs: list[int]) -> None:
    weights = [_weight(count, 576, seed) for seed, count in enumerate(outputs)]
    x = np.random.default_rng(1).normal(size=(tokens, 576)).astype(np.float32)
    matrix = Matrix(weights)
    parts = matrix.apart(matrix(x))
    for part, weight in zip(parts, weights, strict=True):
        exact = np.array(weight.astype(mx.float32)).astype(np.float64).T
        terms = np.abs(x) @ np.abs(exact)
        assert np.all(np.abs(part - x.astype(np.float64) @ exact) <= TOLERANCE * terms)


@has_units
def test_a_tokens_product_does_not_depend_on_the_batch() -> None:
    matrix = Matrix([_weight(576, 1536, 0)])
    x = np.random.default_rng(2).normal(size=(520, 1536)).astype(np.float32)
    alone = matrix(x[7:8]).copy()
    for tokens in (8, 16, 33, 64, 65, 100, 520):
        assert np.array_equal(matrix(x[:tokens])[7:8], alone)


@has_units
def test_only_layers_with_bfloat16_values_are_converted() -> None:
    model = _llama()
    lossless = model.layers[0].mlp.up_proj
    lossless.weight = lossless.weight.astype(mx.bfloat16).astype(mx.float32)
    other = model.layers[1].mlp.up_proj
    weight = other.weight
    assert bf16_linear.install(model, exactly=True)
    assert type(lossless) is bf16_linear.Bf16Linear
    assert type(other) is nn.Linear
    assert mx.array_equal(other.weight, weight).item()
    # A step that computes only embeddings calls the output layer with no tokens.
    assert lossless(mx.zeros((1, 0, lossless.weight.shape[1]))).shape == (1, 0, weight.shape[0])


@has_units
def test_without_memory_for_a_copy_layers_are_not_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 20)
    model = _llama()
    assert not bf16_linear.install(model, exactly=False)
    assert type(model.layers[0].mlp.up_proj) is nn.Linear


@has_units
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [3, 70])
def test_a_converted_model_equals_the_model_with_rounded_weights(
    tied: bool, bias: bool, tokens: int
) -> None:
    model, reference = _llama(tied, bias), _llama(tied, bias)
    reference.apply(lambda array: array.astype(mx.bfloat16).astype(mx.float32))
    model.update(reference.parameters())
    assert bf16_linear.install(model, exactly=False)
    inputs = mx.random.randint(0, 512, (2, tokens), key=mx.random.key(3))
    difference = mx.abs(model(inputs) - reference(inputs)).max() / mx.abs(reference(inputs)).max()
    assert difference.item() < 1e-4


@has_units
def test_an_mlp_is_fused_around_swiglu_but_not_around_another_activation() -> None:
    model = _llama()
    other = model.layers[1].mlp

    class Squared(llama.MLP):  # type: ignore[misc, name-defined]
        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = self.down_proj(nn.relu2(self.gate_proj(x)) * self.up_proj(x))
            return result

    other.__class__ = Squared
    x = mx.random.normal((1, 5, 256), key=mx.random.key(1))
    expected = other(x)
    assert bf16_linear.install(model, exactly=False)
    assert type(other) is Squared
    assert type(model.layers[0].mlp) is not llama.MLP
    assert mx.allclose(other(x), expected, rtol=0.05, atol=0.02).item()


@has_units
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "deepseek_v3", "mamba2", "qwen3_next"])
def test_other_architectures_can_be_converted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_linear, "MIN_WEIGHTS", 0)
    model = tiny_model(name)
    model.apply(lambda array: array.astype(mx.bfloat16).astype(mx.float32))
    tokens = mx.array([[1, 5, 2, 7, 3]])
    expected = model(tokens, cache=make_prompt_cache(model))
    assert bf16_linear.install(model, exactly=True)
    difference = mx.abs(model(tokens, cache=make_prompt_cache(model)) - expected).max()
    assert difference.item() < 1e-3 * mx.abs(expected).max().item()


@has_units
def test_a_model_without_large_layers_is_not_converted() -> None:
    model = _llama(width=64)
    assert not bf16_linear.install(model, exactly=False)


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    workspace = _Workspace(*x.shape, 1)
    workspace.split(x)
    return [(piece.astype(np.uint32) << 16).view(np.float32) for piece in workspace.pieces]


def _weight(outputs: int, inputs: int, seed: int) -> mx.array:
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(seed)).astype(mx.bfloat16)
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
