"""Functions of single tokens equal their definitions, compiled and in NumPy."""

from __future__ import annotations

import math
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu import elementwise
from chairlift.engine.cpu.compiled import compiled_elementwise
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.elementwise import HostNorm, geglu, rotated, swiglu

TOKENS = st.integers(1, 40)
NUMBERS = st.sampled_from([1, 16, 33, 64, 576, 1536])


@pytest.fixture(autouse=True, params=["compiled", "NumPy"])
def _way(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "NumPy":
            patch.setattr(llvm_kernel, "compiled", lambda: None)
        patch.setattr(compiled_elementwise, "MIN_SHARED", 1 << 12)
        yield


@given(tokens=TOKENS, numbers=NUMBERS, scale=st.sampled_from([0.1, 3.0, 200.0]))
@settings(max_examples=40)
def test_gates_equal_their_definition(tokens: int, numbers: int, scale: float) -> None:
    rng = np.random.default_rng(tokens)
    both = (scale * rng.normal(size=(tokens, 2 * numbers))).astype(np.float32)
    gates, others = both[:, :numbers], both[:, numbers:]
    exact = gates.astype(np.float64)
    with np.errstate(over="ignore"):
        silu = exact / (1 + np.exp(-exact))
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    gelu = 0.5 * exact * (1 + np.tanh(inner))
    for function, expected in ((swiglu, silu), (geglu, gelu)):
        result = function(gates, others)
        assert np.allclose(result, expected * others, rtol=2e-5, atol=1e-6 * scale)


def test_numbers_that_are_not_finite_stay_in_their_place() -> None:
    gates, others = np.ones((3, 32), np.float32), np.ones((3, 32), np.float32)
    gates[1, 5], gates[2, 7] = np.nan, np.inf
    gates[0, 3] = -np.inf
    for function in (swiglu, geglu):
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(function(gates, others))
        assert not finite[1, 5]
        assert not finite[2, 7]
        finite[0, 3] = finite[1, 5] = finite[2, 7] = True
        assert finite.all()


@given(tokens=TOKENS, numbers=NUMBERS, heads=st.integers(1, 3))
@settings(max_examples=40)
def test_norms_equal_mlxs(tokens: int, numbers: int, heads: int) -> None:
    import mlx.core as mx

    rng = np.random.default_rng(tokens)
    layer = nn.RMSNorm(numbers, eps=1e-5)
    layer.weight = mx.array(rng.normal(size=numbers).astype(np.float32))
    norm = HostNorm(layer, numbers)
    x = rng.normal(size=(tokens, 2 * heads, numbers)).astype(np.float32)
    for part in (x, x[:, :heads], x[:, 0]):
        assert np.allclose(norm(part), np.array(layer(mx.array(part))), rtol=1e-4, atol=1e-5)


@given(tokens=TOKENS, heads=st.integers(1, 5), half=st.sampled_from([4, 16, 20, 32, 64]))
@settings(max_examples=40)
def test_rotary_embedding_equals_its_definition(tokens: int, heads: int, half: int) -> None:
    rng = np.random.default_rng(tokens)
    angles = rng.normal(size=(tokens, half)).astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)
    wide = rng.normal(size=(tokens, heads + 2, 2 * half)).astype(np.float32)
    x = wide[:, :heads]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles.astype(np.float64))[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    assert np.allclose(rotated(x, cosines, sines), expected, atol=1e-5)


def test_an_undivided_shape_is_computed_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = np.ones((2, 7), np.float32)
    assert compiled_elementwise.gated("swiglu", odd, odd) is None
    called: list[int] = []
    numpys = elementwise._swiglu
    monkeypatch.setattr(
        elementwise, "_swiglu", lambda *gates: (called.append(1), numpys(*gates))[1]
    )
    assert swiglu(odd, odd).shape == (2, 7)
    assert called
