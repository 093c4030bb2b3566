"""Recurrent states that the steps of a graph change in the memory of the cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conformance.configs import tiny_args
from conformance.weights import randomize

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.cache.state import StateLayer
from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu import host_linear
from chairlift.engine.cpu.compiled import recurrence
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.recorder import observed

pytestmark = pytest.mark.skipif(not recurrence.available(), reason="needs the extra jit")

# Numbers of a line of the state, which fill registers on every CPU.
SIZES = {
    "granitemoehybrid": ("mamba_d_state", 32),
    "nemotron_h": ("ssm_state_size", 32),
    "qwen3_next": ("linear_key_head_dim", 32),
}


@pytest.fixture(params=SIZES)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)
    module, args = tiny_args(request.param)
    name, size = SIZES[request.param]
    assert hasattr(args, name)
    setattr(args, name, size)
    model = randomize(module.Model(args), 0)
    adapt(model)
    accelerate(model)
    lowered = [layer.graph.lowered(2) for layer in model.layers if hasattr(layer, "graph")]
    assert any(each is not None and each.in_place for each in lowered)
    return model


def _filled(model: Any) -> BatchCache:
    batch = make_batch(model)
    for length in (3, 8):
        prompt = make_batch(model)
        prompt.join(columns=length)
        with prompt.step(length):
            mx.eval(model(mx.arange(1, length + 1)[None], cache=prompt.layers))
        batch.join(prompt.extract(0), columns=length + 12)
    return batch


def _stepped(model: Any, batch: BatchCache, context: Any, token: int) -> np.ndarray:
    with context(), batch.step(1):
        logits = model(mx.full((len(batch), 1), token), cache=batch.layers)
        mx.eval(logits, [layer.state for layer in batch.layers])
    return np.array(logits)


@pytest.mark.parametrize("case", ["steps", "snapshots", "other strides"])
def test_states_are_those_of_the_code(model: Any, case: str) -> None:
    """Also while snapshots hold them, and where their numbers lie in another order."""
    ours, theirs = _filled(model), _filled(model)
    taken = []
    for token in range(1, 7):
        if case == "snapshots":
            taken.append((ours.extract(token % 2), theirs.extract(token % 2)))
        if case == "other strides":
            for layer in ours.layers:
                if isinstance(layer, StateLayer):
                    for slot, array in list(layer._slots.items()):
                        turned = mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)
                        mx.eval(turned)
                        layer._slots[slot] = turned
        one = _stepped(model, ours, nullcontext, token)
        other = _stepped(model, theirs, observed, token)
        bound = 1e-3 * float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=bound)
    for mine, plain in taken:
        for one, other in zip(mine.layers, plain.layers, strict=True):
            arrays = zip(getattr(one, "arrays", ()), getattr(other, "arrays", ()), strict=True)
            for own, expected in arrays:
                wide = np.array(expected)
                close = 1e-3 * float(np.abs(wide).max(initial=0))
                np.testing.assert_allclose(np.array(own), wide, rtol=1e-3, atol=close)
