"""Products with the weights of experts, in small and large tiles of tokens, emulated on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cuda import experts, grouped, tiled
from chairlift.engine.cuda.grouped import FORMS, PairRows, Weights, grouped_product, quantize
from chairlift.engine.cuda.tiled import LARGE, SMALL, tile_tokens, tiled_product

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

OUTPUTS, INPUTS = 64, 256


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
    tile: int | None = None,
    outputs: int = OUTPUTS,
    scattered: bool = False,
) -> None:
    """Asserts the products of so many pairs of each expert.

    Args:
        each: pairs of a token, if ``listed``.
        with_nan: a token is NaN; that must change no other token's product.
        tile: tokens of a tile of ``tiled_product``; None: ``grouped_product``'s are asserted.
        scattered: whether pairs have other rows than their places.
    """
    keys = mx.random.split(mx.random.key(sum(counts)), 3)
    shape = (len(counts), outputs, inputs)
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
    rows = grouped.IN_ORDER
    if scattered:
        read, written = (mx.random.permutation(len(own), key=key) for key in keys[:2])
        rows = PairRows(read.astype(mx.uint32), written.astype(mx.uint32))
    with emulated(grouped if tile is None else tiled, backwards):
        if tile is None:
            actual = grouped_product(x, own, weights, rows, listed=listed)
        else:
            actual = tiled_product(x, own, weights, tile, rows)
    if scattered:
        x, actual = x[read], actual[written]
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
    scattered=st.booleans(),
)
@settings(max_examples=18, deadline=None)
def test_any_sorted_tokens(
    form: Quantized,
    dtype: mx.Dtype,
    counts: list[int],
    index_type: mx.Dtype,
    length: int,
    backwards: bool,
    scattered: bool,
) -> None:
    """Every quantization, rows of any length, and a token that is NaN beside others."""
    _check_products(
        *(counts, form, dtype),
        inputs=length * max(form.group, 32),
        backwards=backwards,
        index_type=index_type,
        with_nan=True,
        scattered=scattered,
    )


@pytest.mark.slow
@given(
    form=st.sampled_from(QUANTIZATIONS),
    dtype=st.sampled_from([mx.bfloat16, mx.float16]),
    counts=st.lists(st.sampled_from((0, 1, 16, 17, 63, 64, 130)), min_size=1, max_size=40)
    .filter(any)
    .filter(lambda counts: sum(counts) <= 400),
    index_type=st.sampled_from(INDEX_TYPES),
    length=st.integers(1, 7),
    outputs=st.sampled_from((32, 128, 160)),
    ample=st.booleans(),
    backwards=st.booleans(),
    scattered=st.booleans(),
    tile=st.sampled_from([SMALL, LARGE]),
    with_bias=st.booleans(),
)
@settings(max_examples=24, deadline=None)
def test_any_tiles(
    form: Quantized,
    dtype: mx.Dtype,
    counts: list[int],
    index_type: mx.Dtype,
    length: int,
    outputs: int,
    ample: bool,
    backwards: bool,
    scattered: bool,
    tile: int,
    with_bias: bool,
) -> None:
    """Tiles that are full or not, of tokens and of outputs, and experts without tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "ample_shared", lambda: ample)
        _check_products(
            *(counts, form, dtype),
            inputs=length * max(form.group, 32),
            backwards=backwards,
            index_type=index_type,
            with_nan=True,
            with_bias=with_bias,
            scattered=scattered,
            outputs=outputs,
            tile=tile,
        )


def _larger(product: Callable[..., mx.array], *given: object, **more: object) -> mx.array:
    return product(*given, **more) * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("form", [Quantized(0, 0), Quantized(4, 32, "mxfp4")])
@pytest.mark.parametrize("biased", [False, True])
def test_a_right_kernel_passes_its_trial(
    form: Quantized, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that computes something else does not."""
    trials = experts.kernel_works.__wrapped__, experts.tiles_work.__wrapped__
    monkeypatch.setattr(mx, "cuda", mx, raising=False)
    monkeypatch.setattr(mx, "is_available", lambda: True, raising=False)
    monkeypatch.setattr(tiled, "ample_shared", lambda: True)
    with ExitStack() as stack:
        for module in (grouped, tiled):
            stack.enter_context(emulated(module, False))
        assert all(works(*form, mx.bfloat16, biased) for works in trials)
        for name in ("grouped_product", "tiled_product"):
            product = functools.partial(_larger, getattr(experts, name))
            monkeypatch.setattr(experts, name, product)
        assert not any(works(*form, mx.bfloat16, biased) for works in trials)


@given(pairs=st.integers(1, 1 << 17), count=st.integers(1, 512), bits=st.sampled_from([0, 4, 8]))
def test_more_tokens_have_larger_tiles(pairs: int, count: int, bits: int) -> None:
    weights = Weights(mx.zeros((count, 1, 1)), bits=bits)
    sizes = [tile_tokens(n, weights) or 0 for n in (pairs, 2 * pairs, 512 * count)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == LARGE


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
