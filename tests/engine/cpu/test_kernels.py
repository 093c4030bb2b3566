"""Functions of model files are replaced where they have the known meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import activations, gemma4_text, switch_layers

from chairlift.engine.cpu import kernels

# Another test may have replaced mlx-lm's already.
ORIGINAL = getattr(activations.swiglu, "replaces", activations.swiglu)


def _names(swiglu: Callable[..., mx.array]) -> dict[str, Any]:
    """The globals of a model file with one class, ``Gated``, that calls ``swiglu``."""
    names: dict[str, Any] = {"nn": nn, "swiglu": swiglu}
    exec("class Gated(nn.Module):\n    def __call__(self, x): return swiglu(x, x + 1)", names)
    return names


def test_swiglu_is_replaced_once() -> None:
    names = _names(ORIGINAL)
    model = names["Gated"]()
    x = mx.random.normal((3, 5))
    expected = model(x)
    for _ in range(2):
        assert kernels.install(model)
        assert names["swiglu"].replaces is ORIGINAL
        assert mx.allclose(model(x), expected, rtol=1e-5, atol=1e-6).item()


def test_a_function_of_that_name_with_another_meaning_stays() -> None:
    def swiglu(linear: mx.array, gate: mx.array) -> mx.array:
        return linear - gate

    names = _names(swiglu)
    del names["nn"]
    assert not kernels.install(names["Gated"]())
    assert names["swiglu"] is swiglu


@pytest.mark.parametrize("name", ["silu", "gelu_approx"])
@pytest.mark.parametrize("size", [5, 20_000])
def test_functions_of_one_array(name: str, size: int) -> None:
    names: dict[str, Any] = {"nn": nn}
    exec(f"class Model(nn.Module):\n    def __call__(self, x): return nn.{name}(x)", names)
    model = names["Model"]()
    for _ in range(2):
        assert kernels.install(model)
    assert names["nn"] is not nn
    assert names["nn"].Linear is nn.Linear
    x = mx.random.normal((2, 3, size)) * 5
    for own in (x, x.swapaxes(0, 2), x.astype(mx.bfloat16)):
        expected, actual = getattr(nn, name)(own), model(own)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert mx.allclose(actual, expected, rtol=1e-5, atol=1e-6).item()
    # MLX cannot evaluate what it traces.
    assert mx.allclose(mx.compile(lambda x: model(x))(x), getattr(nn, name)(x), atol=1e-5).item()


@pytest.mark.parametrize("name", ["swiglu_oai", "precise_swiglu", "geglu"])
@pytest.mark.parametrize("size", [5, 20_000])
def test_functions_of_gates(name: str, size: int) -> None:
    module = gemma4_text if name == "geglu" else activations
    original = getattr(module, name)
    original = getattr(original, "replaces", original)
    count = 3 if name == "precise_swiglu" else 2
    names: dict[str, Any] = {"nn": nn, name: original}
    exec(f"class Model(nn.Module):\n    def __call__(self, *x): return {name}(*x)", names)
    model = names["Model"]()
    assert kernels.install(model)
    assert names[name].replaces is original
    inputs = [mx.random.normal((7, size)) * 6 for _ in range(count)]
    assert mx.allclose(model(*inputs), original(*inputs), rtol=1e-4, atol=1e-5).item()
    narrow = [each.astype(mx.float16) for each in inputs]
    assert model(*narrow).dtype == original(*narrow).dtype


def test_experts_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_layers, "swiglu", ORIGINAL)
    layer = switch_layers.SwitchGLU(16, 8, 2, bias=True)  # only those without are fused
    x, indices = mx.random.normal((4, 16)), mx.array([[0], [1], [1], [0]])
    expected = layer(x, indices)
    assert kernels.install(layer)
    assert hasattr(switch_layers.swiglu, "replaces")
    assert mx.allclose(layer(x, indices), expected, rtol=1e-4, atol=1e-5).item()
