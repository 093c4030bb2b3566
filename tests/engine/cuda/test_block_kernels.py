"""A block's kernels beside attention, emulated on the CPU: heads, SwiGLU, adapters, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.on_cuda import split_heads as expected_heads

from chairlift.engine.cuda import grouped, heads, low_rank
from chairlift.engine.cuda.grouped import FORMS, Weights, grouped_product, quantize
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


class Quantized(NamedTuple):
    """How weights are quantized; 0 bits: they are not."""

    bits: int
    group: int
    mode: str = "affine"


QUANTIZATIONS = [
    Quantized(0, 0),
    *(Quantized(bits, group) for bits in (4, 8) for group in (32, 64, 128)),
    *(Quantized(*FORMS[mode], mode) for mode in FORMS),
]
INDEX_TYPES = (mx.uint32, mx.int32, mx.int64)


def _check_products(
    counts: Sequence[int],
    form: Quantized,
    dtype: mx.Dtype,
    *,
    with_bias: bool = True,
    backwards: bool = False,
    inputs: int = INPUTS,
    listed: bool = False,
    each: int = 1,
    index_type: mx.Dtype = mx.uint32,
    with_nan: bool = False,
) -> None:
    """Asserts the products of so many pairs of each expert.

    Args:
        each: pairs of a token, if ``listed``.
        with_nan: a token is NaN; that must change no other token's product.
    """
    keys = mx.random.split(mx.random.key(sum(counts)), 3)
    shape = (len(counts), OUTPUTS, inputs)
    plain = mx.random.normal(shape, dtype, scale=inputs**-0.5, key=keys[0])
    bias = mx.random.normal(shape[:2], dtype, key=keys[1]) if with_bias else None
    weights = Weights(plain, bias=bias)
    if form.bits:
        weights, plain = quantize(plain, *form, bias)
    if weights.biases is not None:
        # Rounded once, as the kernel does it.
        exact = (array.astype(mx.float32) for array in (weights.scales, weights.biases))
        plain = mx.dequantize(weights.weight, *exact, form.group, form.bits).astype(dtype)
    assert weights.are_fit
    x = mx.random.normal((sum(counts) // each, inputs), dtype, key=keys[2])
    if with_nan:
        x[len(x) // 2] = mx.nan
    own = mx.array(np.repeat(np.arange(len(counts)), counts)).astype(index_type)
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
    assert mx.allclose(actual, expected, rtol=0.01, atol=0.005, equal_nan=True).item()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), [(0, 0), (4, 32), (4, 128), (8, 32), (8, 64)])
@pytest.mark.parametrize("counts", [[1], [2], [71], [0, 3, 0], [9, 0, 64, 1, 17]], ids=str)
def test_each_token_gets_the_product_of_its_expert(
    counts: list[int], bits: int, group: int, dtype: mx.Dtype
) -> None:
    """A single expert, experts without tokens, and tokens that do not fill a tile."""
    form = Quantized(bits, group)
    for backwards in (False, True):
        _check_products(counts, form, dtype, with_bias=len(counts) > 1, backwards=backwards)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("mode", [*FORMS, "affine"])
@pytest.mark.parametrize("inputs", [32, 256, 288, 960])
def test_weights_of_small_floats_and_rows_of_any_length(
    mode: str, inputs: int, dtype: mx.Dtype
) -> None:
    """Also rows whose length is no multiple of what a warp reads at once, as gpt-oss has."""
    form = Quantized(*FORMS.get(mode, (4, 32)), mode)
    for backwards in (False, True):
        _check_products([9, 0, 20, 1], form, dtype, backwards=backwards, inputs=inputs)
    _check_products([5], form, dtype, with_bias=False, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("form", [Quantized(0, 0), Quantized(4, 32, "mxfp4")])
@pytest.mark.parametrize(
    ("counts", "each"),
    [([1, 0], 1), ([1, 1, 2], 4), ([0, 33, 0, 1, 2], 2), ([64], 8), ([20, 0, 43], 3)],
    ids=str,
)
def test_few_pairs_are_in_any_order(counts: list[int], each: int, form: Quantized) -> None:
    """Also one expert, and pairs in more than one of a warp's lists."""
    for backwards in (False, True):
        _check_products(counts, form, mx.bfloat16, backwards=backwards, listed=True, each=each)


@pytest.mark.slow
@given(
    form=st.sampled_from(QUANTIZATIONS),
    dtype=st.sampled_from([mx.bfloat16, mx.float16]),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    index_type=st.sampled_from(INDEX_TYPES),
    length=st.integers(1, 7),
    backwards=st.booleans(),
)
@settings(max_examples=18, deadline=None)
def test_any_sorted_tokens(
    form: Quantized,
    dtype: mx.Dtype,
    counts: list[int],
    index_type: mx.Dtype,
    length: int,
    backwards: bool,
) -> None:
    """Every quantization, rows of any length, and a token that is NaN beside others."""
    _check_products(
        *(counts, form, dtype),
        inputs=length * max(form.group, 32),
        backwards=backwards,
        index_type=index_type,
        with_nan=True,
    )


@pytest.mark.slow
@given(
    form=st.sampled_from(QUANTIZATIONS),
    dtype=st.sampled_from([mx.bfloat16, mx.float16]),
    tokens=st.integers(1, 16),
    each=st.integers(1, 4),
    data=st.data(),
    length=st.integers(1, 7),
    backwards=st.booleans(),
)
@settings(max_examples=18, deadline=None)
def test_any_few_tokens(
    form: Quantized,
    dtype: mx.Dtype,
    tokens: int,
    each: int,
    data: st.DataObject,
    length: int,
    backwards: bool,
) -> None:
    """The same for pairs that are not sorted."""
    pairs = tokens * each
    own = data.draw(st.lists(st.integers(0, 6), min_size=pairs, max_size=pairs))
    _check_products(
        *(np.bincount(own, minlength=1).tolist(), form, dtype),
        inputs=length * max(form.group, 32),
        backwards=backwards,
        listed=True,
        each=each,
        index_type=data.draw(st.sampled_from(INDEX_TYPES)),
        with_nan=True,
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("mode", FORMS)
def test_all_codes_of_small_floats(mode: str, dtype: mx.Dtype) -> None:
    """Each code of a weight, with each scale, is the number that it means, rounded once."""
    bits, group = FORMS[mode]
    codes = np.arange(256, dtype=np.uint8)
    if bits == 4:
        codes = (codes[::2] & 15) | (codes[1::2] & 15) << 4
    else:
        codes[[127, 255]] = 0  # NaN
    packed = mx.array(np.tile(codes, (1, 256, 1)).view(np.uint32))
    scales = mx.repeat(mx.arange(256, dtype=mx.uint8)[None, :, None], 256 // group, axis=2)
    weights = Weights(packed, scales, None, bits, group, None, mode, dtype)
    assert weights.are_fit
    with emulated(grouped, False):
        products = grouped_product(mx.eye(256, dtype=dtype), mx.zeros((1,), mx.uint32), weights)
    exact = mx.dequantize(packed[0], scales[0], mode=mode, dtype=mx.float32)
    actual, expected = (
        np.array(array.astype(mx.float32)) for array in (products.T, exact.astype(dtype))
    )
    # In a row with an infinite number, all others are multiplied by zeros and that number.
    rows = np.isfinite(expected).all(axis=1)
    assert rows.sum() > 128
    np.testing.assert_array_equal(actual[rows], expected[rows])


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
