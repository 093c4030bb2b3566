"""A block's kernels beside attention, emulated on the CPU: heads, SwiGLU, adapters, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.on_cuda import split_heads as expected_heads

from chairlift.engine.cuda import grouped, heads, low_rank
from chairlift.engine.cuda.grouped import FORMS, Weights, grouped_product
from chairlift.engine.cuda.heads import HeadNorms, Heads, split_heads, swiglu
from chairlift.engine.cuda.low_rank import add_low_rank

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

OUTPUTS, INPUTS = 64, 256
TOLERANCES = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 0.03}


def _random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _assert_close(actual: mx.array, expected: mx.array, dtype: mx.Dtype) -> None:
    tolerance = TOLERANCES[dtype]
    assert actual.dtype == dtype
    assert mx.allclose(actual, expected, rtol=tolerance, atol=tolerance).item()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("counts", "dim", "turned", "normed", "biased"),
    [
        ((4, 2), 64, 64, True, False),
        ((3, 1), 128, 128, False, True),
        ((5, 5), 80, 20, False, False),
        ((2, 1), 256, 64, True, True),
        ((1, 1), 16, 2, True, False),
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5)])
def test_heads_are_split(
    shape: tuple[int, int],
    counts: tuple[int, int],
    dim: int,
    turned: int,
    normed: bool,
    biased: bool,
    dtype: mx.Dtype,
) -> None:
    """Heads that do not fill a block, and rotary embedding of all or of few numbers."""
    width = (counts[0] + 2 * counts[1]) * dim
    product = _random(*shape, width, dtype=dtype)
    norms = HeadNorms(*(_random(dim, dtype=dtype, seed=n) for n in (1, 2)), 1e-5)
    frequencies = 100.0 ** (-mx.arange(turned // 2) / max(1, turned // 2))
    bias = _random(width, dtype=dtype, seed=3) if biased else None
    form = Heads(*counts, dim, frequencies, norms if normed else None, bias)
    positions = mx.array([7, 0, 130][: shape[0]], mx.int32)
    for backwards in (False, True):
        with emulated(heads, backwards), pytest.MonkeyPatch.context() as patch:
            patch.setattr(heads, "_WARPS", 2 if backwards else 4)
            actual = split_heads(product, positions, form)
            mx.eval(actual)
        for one, other in zip(actual, expected_heads(product, positions, form), strict=True):
            assert one.shape == other.shape
            _assert_close(one, other, dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 2, 24), (1, 65, 40)])
def test_swiglu_of_gate_and_up(shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    """Also for gates whose exponential is infinite or 0."""
    product = _random(*shape[:2], 2 * shape[2], dtype=dtype)
    product = mx.where(mx.arange(2 * shape[2]) % 7 == 3, 100 * product, product).astype(dtype)
    with emulated(heads, backwards=False):
        actual = swiglu(product)
    gate, up = mx.split(product.astype(mx.float32), 2, axis=-1)
    assert actual.shape == shape
    _assert_close(actual, nn.silu(gate) * up, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("inputs", "rank", "outputs"), [(8, 1, 5), (264, 12, 2100), (64, low_rank.MAX_RANK, 2048)]
)
def test_products_of_adapters_are_added(
    inputs: int, rank: int, outputs: int, dtype: mx.Dtype
) -> None:
    own = [1, -1, 0, 1]
    y, x = (_random(len(own), n, dtype=dtype, seed=n) for n in (outputs, inputs))
    a = (_random(2, rank, inputs, seed=1) / inputs).astype(dtype)
    b = _random(2, rank, outputs, dtype=dtype, seed=2)
    for backwards in (False, True):
        with emulated(low_rank, backwards):
            actual = add_low_rank(y, x, mx.array(own, mx.int32), a, b)
        wide = [array.astype(mx.float32) for array in (y, x, a, b)]
        rows = [
            wide[0][n] if slot < 0 else wide[0][n] + (wide[1][n] @ wide[2][slot].T) @ wide[3][slot]
            for n, slot in enumerate(own)
        ]
        _assert_close(actual, mx.stack(rows), dtype)


def _check_products(
    counts: Sequence[int],
    bits: int,
    group: int,
    dtype: mx.Dtype,
    with_bias: bool = True,
    backwards: bool = False,
    inputs: int = INPUTS,
    mode: str = "affine",
    listed: bool = False,
    each: int = 1,
) -> None:
    """Asserts the product of so many tokens of each expert; ``each`` pairs have the same token."""
    keys = mx.random.split(mx.random.key(sum(counts)), 3)
    shape = (len(counts), OUTPUTS, inputs)
    plain = mx.random.normal(shape, dtype, scale=inputs**-0.5, key=keys[0])
    bias = mx.random.normal(shape[:2], dtype, key=keys[1]) if with_bias else None
    weights = Weights(plain, bias=bias)
    if mode != "affine":
        packed, scales = mx.quantize(plain, mode=mode)
        weights = Weights(packed, scales, None, bits, group, bias, mode, dtype)
        plain = mx.dequantize(packed, scales, mode=mode, dtype=dtype)
    elif bits:
        packed, scales, biases = mx.quantize(plain, group, bits)
        weights = Weights(packed, scales, biases, bits, group, bias)
        # Rounded once, as the kernel does it.
        exact = (array.astype(mx.float32) for array in (scales, biases))
        plain = mx.dequantize(packed, *exact, group, bits).astype(dtype)
    assert weights.are_fit
    x = mx.random.normal((sum(counts) // each, inputs), dtype, key=keys[2])
    own = mx.array(np.repeat(np.arange(len(counts)), counts).astype(np.uint32))
    if listed:
        own = mx.random.permutation(own, key=keys[2])
    with emulated(grouped, backwards):
        actual = grouped_product(x, own, weights, listed=listed)
    x = mx.repeat(x, each, axis=0)
    wide = plain[own].astype(mx.float32)
    expected = (x[:, None].astype(mx.float32) @ wide.swapaxes(1, 2))[:, 0]
    if bias is not None:
        expected += bias[own]
    assert actual.dtype == dtype
    assert mx.allclose(actual, expected, rtol=0.01, atol=0.005).item()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), [(0, 0), (4, 32), (4, 128), (8, 32), (8, 64)])
@pytest.mark.parametrize("counts", [[1], [2], [71], [0, 3, 0], [9, 0, 64, 1, 17]], ids=str)
def test_each_token_gets_the_product_of_its_expert(
    counts: list[int], bits: int, group: int, dtype: mx.Dtype
) -> None:
    """A single expert, experts without tokens, and tokens that do not fill a tile."""
    for backwards in (False, True):
        _check_products(counts, bits, group, dtype, with_bias=len(counts) > 1, backwards=backwards)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("mode", [*FORMS, "affine"])
@pytest.mark.parametrize("inputs", [32, 256, 288, 960])
def test_weights_of_small_floats_and_rows_of_any_length(
    mode: str, inputs: int, dtype: mx.Dtype
) -> None:
    """Also rows whose length is no multiple of what a warp reads at once, as gpt-oss has."""
    bits, group = FORMS.get(mode, (4, 32))
    for backwards in (False, True):
        _check_products([9, 0, 20, 1], bits, group, dtype, True, backwards, inputs, mode)
    _check_products([5], bits, group, dtype, False, False, inputs, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group", "mode"), [(0, 0, "affine"), (4, 32, "mxfp4")])
@pytest.mark.parametrize(
    ("counts", "each"),
    [([1, 0], 1), ([1, 1, 2], 4), ([0, 33, 0, 1, 2], 2), ([64], 8), ([20, 0, 43], 3)],
    ids=str,
)
def test_few_pairs_are_in_any_order(
    counts: list[int], each: int, bits: int, group: int, mode: str
) -> None:
    """Also one expert, and pairs in more than one of a warp's lists."""
    options: dict[str, Any] = {"mode": mode, "listed": True, "each": each}
    for backwards in (False, True):
        _check_products(counts, bits, group, mx.bfloat16, True, backwards, **options)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("mode", FORMS)
def test_all_codes_of_small_floats(mode: str, dtype: mx.Dtype) -> None:
    """Each code of a weight, with scales of all sizes that a model has, is read as MLX reads it."""
    bits, group = FORMS[mode]
    numbers = np.arange(256, dtype=np.uint8)
    if mode == "mxfp8":
        numbers[[127, 255]] = 0  # NaN
    codes = numbers if bits == 8 else (numbers[::2] & 15) | (numbers[1::2] & 15) << 4
    packed = mx.array(np.tile(codes, (1, 32, 1)).view(np.uint32))
    first = 1 if mode == "nvfp4" else 110
    places = np.arange(32 * 256 // group).reshape(1, 32, -1)
    scales = mx.array(first + places % 24, mx.uint8)
    weights = Weights(packed, scales, None, bits, group, None, mode, dtype)
    assert weights.are_fit
    with emulated(grouped, False):
        actual = grouped_product(mx.eye(256, dtype=dtype), mx.zeros((1,), mx.uint32), weights)
    expected = mx.dequantize(packed[0], scales[0], mode=mode, dtype=dtype)
    assert mx.array_equal(actual.T, expected).item()


@pytest.mark.slow
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    bits=st.sampled_from([0, 4, 8]),
    backwards=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_any_tokens_of_experts(counts: list[int], bits: int, backwards: bool) -> None:
    _check_products(counts, bits, 64, mx.bfloat16, backwards=backwards)


@pytest.mark.parametrize(
    ("bits", "group", "types", "fits"),
    [
        (4, 64, (mx.bfloat16, mx.bfloat16, mx.bfloat16), True),
        (8, 32, (mx.float16, mx.float16, None), True),
        (4, 64, (mx.bfloat16, mx.bfloat16, mx.float32), False),
        (4, 64, (mx.bfloat16, mx.float32, None), False),
        (4, 64, (mx.bfloat16, None, None), False),
        (4, 64, (mx.float32, mx.float32, None), False),
        (4, 64, (mx.uint8, None, None), False),
        (6, 64, (mx.bfloat16, mx.bfloat16, None), False),
        (3, 64, (mx.bfloat16, mx.bfloat16, None), False),
        (8, 16, (mx.bfloat16, mx.bfloat16, None), False),
        (0, 0, (mx.bfloat16, None, mx.bfloat16), True),
        (0, 0, (mx.bfloat16, None, mx.float32), False),
        (0, 0, (mx.float32, None, mx.float32), False),
    ],
)
def test_the_kernel_takes_weights_of_one_type(
    bits: int, group: int, types: tuple[mx.Dtype, mx.Dtype | None, mx.Dtype | None], fits: bool
) -> None:
    """A kernel reads all arrays as numbers of one type: another would be no compilable source."""
    first, second, third = types
    bias = None if third is None else mx.zeros((2, OUTPUTS), third)
    if not bits:
        weights = Weights(mx.zeros((2, OUTPUTS, INPUTS), first), bias=bias)
    else:
        words = mx.zeros((2, OUTPUTS, INPUTS * bits // 32), mx.uint32)
        scales = mx.zeros((2, OUTPUTS, INPUTS // group), first)
        biases = None if second is None else mx.zeros(scales.shape, second)
        weights = Weights(words, scales, biases, bits, group, bias)
    assert weights.are_fit == fits
