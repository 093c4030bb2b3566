"""Products of experts are as exact as in float32, whichever tokens each expert has."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.weights import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import switch_layers
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from support.engine.reference import logits_of_prompt

from chairlift.engine.cpu import experts, kernels
from chairlift.engine.cpu.compiled import compiled_experts
from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts
from chairlift.engine.cpu.experts import ExpertRouter, HostSwitchGLU, HostSwitchLinear, routes_of
from chairlift.engine.device import memory
from chairlift.engine.errors import UnsupportedModel

pytestmark = pytest.mark.skipif(
    not compiled_experts.available(), reason="needs llvmlite (extra jit)"
)

# The relative error of a sum of terms that are added in float32, in any order.
TOLERANCE = 2.0**-21


def _weights(count: int, outputs: int, inputs: int, narrow: bool) -> mx.array:
    numbers = np.random.default_rng(count).normal(size=(count, outputs, inputs))
    weights = mx.array(numbers.astype(np.float32))
    return weights.astype(mx.bfloat16).astype(mx.float32) if narrow else weights


@given(
    st.lists(st.integers(0, 4), max_size=60),
    st.sampled_from([1, 31, 64, 100]),
    st.sampled_from([1, 17, 1100]),
    st.booleans(),
)
def test_each_token_gets_its_own_experts_product(
    chosen: list[int], outputs: int, inputs: int, narrow: bool
) -> None:
    """Any experts, also all the same or none; more inputs than the kernel multiplies at a time."""
    weights = _weights(5, outputs, inputs, narrow)
    layer = CompiledExperts(weights)
    own = np.array(chosen, np.uint32)
    x = np.random.default_rng(1).normal(size=(len(own), inputs)).astype(np.float32)
    order, groups = routes_of(own)
    result = np.empty((len(own), outputs), np.float32)
    result[order] = layer(x[order], groups)
    exact = np.array(weights).astype(np.float64)[own]
    for token in range(len(own)):
        terms = np.abs(exact[token]) @ np.abs(x[token]).astype(np.float64)
        expected = exact[token] @ x[token].astype(np.float64)
        assert np.all(np.abs(result[token] - expected) <= TOLERANCE * terms)


def test_a_tokens_product_does_not_depend_on_the_others() -> None:
    layer = CompiledExperts(_weights(3, 96, 200, True))
    x = np.random.default_rng(2).normal(size=(70, 200)).astype(np.float32)
    alone = layer(x[5:6], np.array([[1, 0, 1]])).copy()
    for first, count in ((0, 70), (5, 1), (4, 30)):
        together = layer(x, np.array([[0, 0, first], [1, first, count]])[first == 0 :])
        assert np.array_equal(together[5:6], alone)


@pytest.mark.parametrize(
    "groups",
    [[[3, 0, 1]], [[-1, 0, 1]], [[0, 0, 5]], [[0, 4, 1]], [[0, -1, 1]], [[0, 2, 0]], [[0, 3, -2]]],
)
def test_groups_beyond_the_weights_or_the_tokens_are_refused(groups: list[list[int]]) -> None:
    layer = CompiledExperts(_weights(3, 8, 8, True))
    with pytest.raises(ValueError, match=r"experts|groups"):
        layer(np.zeros((4, 8), np.float32), np.array(groups))
    with pytest.raises(ValueError, match="do not fit"):
        layer(np.zeros((4, 9), np.float32), np.array([[0, 0, 4]]))


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layers_outputs_stay_the_same(tokens: int, exactly: bool, bias: bool) -> None:
    """With few tokens mlx-lm does not sort them; from 64 pairs on it does."""
    mx.random.seed(3)
    layer = SwitchGLU(48, 80, 6, bias=bias)
    for product in (layer.gate_proj, layer.up_proj, layer.down_proj):
        if bias:
            product.bias = mx.random.normal(product.bias.shape)
        if not exactly:
            product.weight = product.weight.astype(mx.bfloat16).astype(mx.float32)
    x = mx.random.normal((1, tokens, 48))
    indices = mx.argsort(mx.random.normal((1, tokens, 6)), axis=-1)[..., :2]
    expected = layer(x, indices)
    mx.eval(expected)
    assert experts.install(layer, exactly)
    if bias:
        assert type(layer.down_proj) is HostSwitchLinear
    else:
        assert type(layer) is HostSwitchGLU
    assert mx.allclose(layer(x, indices), expected, rtol=1e-4, atol=1e-5).item()


def test_weights_are_rounded_only_if_they_may_be() -> None:
    for exactly in (True, False):
        layer = SwitchGLU(16, 8, 2)
        before = mx.array(layer.up_proj.weight)
        assert experts.install(layer, exactly)
        same = mx.array_equal(layer.up_proj.weight, before).item()
        assert same == exactly
        rounded = before.astype(mx.bfloat16).astype(mx.float32)
        assert mx.array_equal(layer.up_proj.weight, before if exactly else rounded).item()


def test_other_types_and_shapes_are_left_to_mlx() -> None:
    layer = SwitchGLU(16, 8, 2, bias=True)
    assert experts.install(layer, True)
    product: Any = layer.up_proj
    indices = mx.array([[1], [0]])
    several = mx.random.normal((2, 1, 3, 16))
    expected = SwitchLinear.__call__(product, several, indices)
    assert mx.array_equal(product(several, indices), expected).item()
    none = product(mx.zeros((0, 1, 1, 16)), mx.zeros((0, 2), mx.uint32))
    assert none.shape == (0, 2, 1, 8)
    half = SwitchGLU(16, 8, 2)
    half.set_dtype(mx.bfloat16)
    assert not experts.install(half, True)
    fused = SwitchGLU(16, 8, 2)
    assert experts.install(fused, True)
    assert fused(mx.zeros((0, 16)), mx.zeros((0, 2), mx.uint32)).shape == (0, 2, 16)
    # float32 weights and other tokens: the result has the type that MLX gives it.
    x = mx.random.normal((3, 16)).astype(mx.bfloat16)
    chosen = mx.array([[0], [1], [1]])
    assert mx.allclose(fused(x, chosen), SwitchGLU.__call__(fused, x, chosen)).item()


@pytest.mark.parametrize("activation", [switch_layers.SwiGLU, nn.GELU, nn.SiLU])
def test_only_swiglu_is_fused(activation: Any) -> None:
    """Another activation is computed by MLX, between the products."""

    class Gate(nn.Module):
        def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
            return activation()(gate) * x

    is_swiglu = activation is switch_layers.SwiGLU
    layer = SwitchGLU(16, 24, 3, activation=activation() if is_swiglu else Gate())
    x, chosen = mx.random.normal((2, 5, 16)), mx.array([[[0, 2]] * 5, [[1, 0]] * 5])
    expected = layer(x, chosen)
    mx.eval(expected)
    assert experts.install(layer, True)
    assert (type(layer) is HostSwitchGLU) == is_swiglu
    assert mx.allclose(layer(x, chosen), expected, rtol=1e-4, atol=1e-5).item()


def test_without_memory_for_copies_layers_stay_mlxs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SwitchGLU(16, 8, 2)
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    assert not experts.install(layer, True)
    assert type(layer.up_proj) is SwitchLinear


def test_routes_are_found_once_for_the_same_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    router, first, second = ExpertRouter(), mx.array([[2, 0]]), mx.array([[1, 1]])
    found: list[int] = []

    def counted(own: Any) -> Any:
        found.append(len(own))
        return routes_of(own)

    monkeypatch.setattr(experts, "routes_of", counted)
    assert [router(first).groups[:, 0].tolist() for _ in range(3)] == [[0, 2]] * 3
    assert router(second).groups.tolist() == [[1, 0, 2]]
    assert router(first).order.tolist() == [1, 0]
    assert found == [2] * 3


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "granitemoehybrid"])
def test_a_models_logits_stay_the_same(name: str) -> None:
    model = tiny_model(name)
    expected = logits_of_prompt(model, 50, 5)
    assert kernels.install(model)
    assert any(type(layer) in (HostSwitchLinear, HostSwitchGLU) for layer in model.modules())
    actual = logits_of_prompt(model, 50, 5)
    assert mx.abs(actual - expected).max().item() <= 1e-4 * mx.abs(expected).max().item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_experts_that_nothing_multiplies_are_refused(
    name: str, dtype: mx.Dtype, has_scales: bool
) -> None:
    """The flag is named, because float32 is the default."""
    model = tiny_model(name)
    if has_scales:
        nn.quantize(
            model,
            class_predicate=lambda path, layer: (
                type(layer) is SwitchLinear
                and {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
            ),
        )
    model.set_dtype(dtype)
    error = f"--dtype {str(dtype).removeprefix('mlx.core.')}: experts .* in float32 only"
    with pytest.raises(UnsupportedModel, match=error):
        kernels.install(model)
