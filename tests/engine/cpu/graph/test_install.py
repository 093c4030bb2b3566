"""A trial decides whether decoder layers are computed by the steps of their graph."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model

from chairlift.engine.cpu import host_linear, kernels
from chairlift.engine.cpu.compiled import recurrent_layers
from chairlift.engine.cpu.compiled.llvm import kernel
from chairlift.engine.cpu.graph.install import install
from chairlift.engine.cpu.graph.layer import GraphLayer
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.layers import install as layers

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs the extra jit")


def _model(name: str, monkeypatch: pytest.MonkeyPatch, scale: float) -> Any:
    """A model whose logits are ``scale`` times as large."""
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)
    model = tiny_model(name)
    adapt(model)
    layers.install(model, recurrent_layers.kernels())
    kernels.install(model, True)
    base = type(model)

    def call(self: Any, *args: Any, **named: Any) -> mx.array:
        return base.__call__(self, *args, **named) * scale

    model.__class__ = type(base.__name__, (base,), {"__call__": call})
    return model


def _wrong(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Lets steps compute something else by this share."""
    original = GraphLayer.__call__

    def wrong(layer: GraphLayer, x: mx.array, given: Any) -> Any:
        result = original(layer, x, given)
        noise = mx.random.normal(x.shape, key=mx.random.key(0))
        return result if result is None else result + error * noise * result.square().mean() ** 0.5

    monkeypatch.setattr(GraphLayer, "__call__", wrong)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("name", ["olmo2", "lfm2"])
def test_large_logits_reject_no_steps(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(name, monkeypatch, scale)
    assert install(model) == len(model.layers)


def test_constants_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in files whose numbers the model's class does not let anyone cast."""
    model = _model("deepseek_v3", monkeypatch, 1.0)
    gates = [part for path, part in model.named_modules() if path.endswith("gate")]
    assert gates
    for gate in gates:
        gate.e_score_correction_bias = gate.e_score_correction_bias.astype(mx.bfloat16)
    assert install(model) == len(model.layers)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("error", [0.01, 0.3])
def test_wrong_steps_are_rejected(
    error: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model("olmo2", monkeypatch, scale)
    classes = [type(layer) for layer in model.layers]
    _wrong(monkeypatch, error)
    assert install(model) == 0
    assert [type(layer) for layer in model.layers] == classes


def test_steps_may_differ_by_the_noise_of_rounded_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where layers round what they get, numbers that differ in their last bits differ by more."""
    model = _model("olmo2", monkeypatch, 30.0)
    for layer in model.layers:
        _round(layer.mlp)
    _wrong(monkeypatch, 1e-6)
    assert install(model) == len(model.layers)


def _round(layer: Any) -> None:
    base = type(layer)

    def call(self: Any, x: mx.array) -> mx.array:
        return base.__call__(self, (x + 4096) - 4096)

    layer.__class__ = type(base.__name__, (base,), {"__call__": call})
