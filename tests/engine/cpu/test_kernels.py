"""Functions of model files are replaced where they have the known meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import activations, switch_layers

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
    assert not kernels.install(names["Gated"]())
    assert names["swiglu"] is swiglu


def test_experts_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_layers, "swiglu", ORIGINAL)
    layer = switch_layers.SwitchGLU(16, 8, 2, bias=True)  # only those without are fused
    x, indices = mx.random.normal((4, 16)), mx.array([[0], [1], [1], [0]])
    expected = layer(x, indices)
    assert kernels.install(layer)
    assert hasattr(switch_layers.swiglu, "replaces")
    assert mx.allclose(layer(x, indices), expected, rtol=1e-4, atol=1e-5).item()
