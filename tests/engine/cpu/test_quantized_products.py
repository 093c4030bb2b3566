"""Products with quantized weights are those with the dequantized ones, whichever reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu.compiled import quantized_matmul
from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts
from chairlift.engine.cpu.compiled.compiled_matmul import CompiledMatrix
from chairlift.engine.cpu.compiled.llvm import dot
from chairlift.engine.cpu.compiled.quantized_matmul import (
    DotExperts,
    DotMatrix,
    QuantizedExperts,
    QuantizedMatrix,
)
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.experts import routes_of

pytestmark = pytest.mark.skipif(
    not quantized_matmul.available(), reason="needs llvmlite (extra jit)"
)

# The relative error of a sum of terms that are added in float32, in any order.
TOLERANCE = 2.0**-20
# Both kernels, as far as this CPU has them.
MATRICES = [QuantizedMatrix, DotMatrix] if dot.compiled() else [QuantizedMatrix]
EXPERTS = [QuantizedExperts, DotExperts] if dot.compiled() else [QuantizedExperts]
# The bits and the group of a quantization, and MLX's mode.
Form = tuple[int, int, str]
MXFP4: Form = (4, 32, "mxfp4")
AFFINE = st.tuples(
    st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64, 128]), st.just("affine")
)
FORMS = st.one_of(AFFINE, st.just(MXFP4))


def _quantized(form: Form, *shape: int, seed: int = 0) -> Quantized:
    bits, group, mode = form
    numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    packed, scales, *biases = mx.quantize(mx.array(numbers), group, bits, mode=mode)
    return Quantized(packed, scales, biases[0] if biases else None, group, bits)


def _exact(weight: Quantized) -> np.ndarray[Any, np.dtype[np.float64]]:
    packed, scales, biases, group, bits = weight
    mode = "mxfp4" if biases is None else "affine"
    numbers = mx.dequantize(packed, scales, biases, group, bits, mode, dtype=mx.float32)
    return np.array(numbers).astype(np.float64)


def _assert_products(
    result: np.ndarray[Any, Any], x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]
) -> None:
    terms = np.abs(x).astype(np.float64) @ np.abs(weight).T
    # Scales and biases that cancel each other round in a weight of any size.
    largest = np.abs(weight).max() * np.abs(x).sum(axis=-1, keepdims=True)
    difference = np.abs(result - x.astype(np.float64) @ weight.T)
    assert np.all(difference <= TOLERANCE * (terms + largest))


@pytest.mark.parametrize("make", MATRICES)
@given(
    FORMS,
    st.lists(st.sampled_from([1, 31, 64, 100]), min_size=1, max_size=3),
    st.sampled_from([1, 3, 9]),
    st.integers(0, 70),
)
@settings(deadline=None)
def test_products_of_layers_with_the_same_input(
    make: Callable[[list[Quantized]], CompiledMatrix],
    form: Form,
    outputs: list[int],
    groups: int,
    tokens: int,
) -> None:
    """Any bits and groups; more inputs than the kernel multiplies at a time; panels not full."""
    inputs = groups * form[1]
    weights = [_quantized(form, count, inputs, seed=n) for n, count in enumerate(outputs)]
    matrix = make(weights)
    x = np.random.default_rng(7).normal(size=(tokens, inputs)).astype(np.float32)
    result = np.array(matrix(x))
    assert result.shape == (tokens, sum(outputs))
    _assert_products(result, x, np.concatenate([_exact(weight) for weight in weights]))
    for token in range(0, tokens, 13):
        alone = np.array(matrix(x[token : token + 1]))
        assert np.array_equal(result[token], alone[0]), "it depends on the tokens beside it"


@pytest.mark.parametrize("make", MATRICES)
@given(
    st.sampled_from([(4, 32, "affine"), MXFP4]),
    *(st.integers(0, 99), st.integers(-70, 90), st.integers(0, 20)),
)
@settings(deadline=None)
def test_products_of_numbers_of_very_different_sizes(
    make: Callable[[list[Quantized]], CompiledMatrix],
    form: Form,
    seed: int,
    exponent: int,
    spread: int,
) -> None:
    """Groups of zeros, of tiny numbers, and of some that are far larger than the others."""
    rng, weight = np.random.default_rng(seed), _quantized(form, 33, 128, seed=seed)
    x = rng.normal(size=(5, 128)) * 2.0 ** (rng.integers(-spread, spread + 1, (5, 128)) + exponent)
    x[rng.random(size=x.shape) < 0.2] = 0
    x[1, 32:64] = 0
    x = x.astype(np.float32)
    _assert_products(np.array(make([weight])(x)), x, _exact(weight))


@pytest.mark.parametrize("make", MATRICES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [(4, 64, "affine"), MXFP4])
def test_a_number_that_is_not_finite_spoils_its_own_token(
    form: Form, make: Callable[[list[Quantized]], CompiledMatrix], number: float
) -> None:
    weight = _quantized(form, 70, 192)
    matrix, x = make([weight]), np.ones((9, 192), np.float32)
    expected = np.array(matrix(x))
    x[4, 100] = number
    result = np.array(matrix(x))
    assert not np.isfinite(result[4]).any()
    others = [token for token in range(9) if token != 4]
    assert np.array_equal(result[others], expected[others])


@pytest.mark.skipif(not dot.compiled(), reason="needs a CPU that multiplies bytes")
@pytest.mark.parametrize("registers", [dot.Registers(8, 2), dot.Registers(16, 3)])
@pytest.mark.parametrize(
    "form", [(4, 32, "affine"), (3, 64, "affine"), (8, 128, "affine"), (6, 32, "affine"), MXFP4]
)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_other_registers_give_the_same_products(
    registers: dot.Registers, form: Form, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs without AVX-512 have half of the size; those without AMX have no tiles."""
    own = dot.compiled()
    assert own is not None
    if registers.lanes > own.lanes:
        pytest.skip("this CPU has no such registers")
    inputs = groups * form[1]
    weight = _quantized(form, 3, 41, inputs)
    one = Quantized(*(None if part is None else part[1] for part in weight[:3]), *weight[3:])
    x = np.random.default_rng(3).normal(size=(45, inputs)).astype(np.float32)
    # One row, fewer than a tile has, and more.
    experts = np.array([[1, 0, 1], [0, 1, 7], [2, 8, 37]])
    expected = np.array(DotMatrix([one])(x)), np.array(DotExperts(weight)(x, experts))
    kernel = dot.compile_for(registers)
    assert kernel is not None
    monkeypatch.setattr(dot, "compiled", lambda: kernel)
    assert np.array_equal(expected[0], np.array(DotMatrix([one])(x)))
    assert np.array_equal(expected[1], np.array(DotExperts(weight)(x, experts)))


@pytest.mark.parametrize("make", MATRICES)
def test_all_floats_with_all_scales(make: Callable[[list[Quantized]], CompiledMatrix]) -> None:
    """Each of the 16 codes with each exponent of a scale whose numbers are finite."""
    codes = mx.array(np.tile(np.uint32([0x76543210, 0xFEDCBA98] * 2), (251, 1)))
    scales = mx.array(np.arange(251, dtype=np.uint8)[:, None])
    weight = Quantized(codes, scales, None, 32, 4)
    matrix, x = make([weight]), np.eye(32, dtype=np.float32)
    exact = _exact(weight).T
    # A row's largest number decides how its others round.
    assert np.all(np.abs(np.array(matrix(x)) - exact) <= 2.0**-19 * np.abs(exact).max(axis=0))
    layer = nn.QuantizedLinear(32, 251, bias=False, mode="mxfp4")
    layer.weight, layer.scales = codes, scales
    assert Quantized.of(layer) is not None
    layer.scales = scales + 1
    assert Quantized.of(layer) is None, "six times the largest scale is infinite"


@pytest.mark.parametrize("make", EXPERTS)
@given(FORMS, st.lists(st.integers(0, 4), max_size=60), st.sampled_from([1, 31, 100]))
@settings(deadline=None)
def test_each_token_gets_its_own_experts_product(
    make: Callable[[Quantized], CompiledExperts],
    form: Form,
    chosen: list[int],
    outputs: int,
) -> None:
    weight = _quantized(form, 5, outputs, 3 * form[1])
    own = np.array(chosen, np.uint32)
    x = np.random.default_rng(1).normal(size=(len(own), 3 * form[1])).astype(np.float32)
    order, groups = routes_of(own)
    result = np.empty((len(own), outputs), np.float32)
    result[order] = make(weight)(x[order], groups)
    exact = _exact(weight)
    for token, expert in enumerate(chosen):
        _assert_products(result[token : token + 1], x[token : token + 1], exact[expert])
