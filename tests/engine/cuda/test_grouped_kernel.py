"""Products with the weights of experts: the CUDA kernel itself, emulated on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cuda import grouped
from chairlift.engine.cuda.grouped import Weights, grouped_product

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

OUTPUTS, INPUTS = 64, 256


def _check(
    counts: Sequence[int],
    bits: int,
    group: int,
    dtype: mx.Dtype,
    with_bias: bool = True,
    backwards: bool = False,
) -> None:
    """Asserts the product of so many tokens of each expert."""
    keys = mx.random.split(mx.random.key(sum(counts)), 3)
    shape = (len(counts), OUTPUTS, INPUTS)
    plain = mx.random.normal(shape, dtype, scale=INPUTS**-0.5, key=keys[0])
    bias = mx.random.normal(shape[:2], dtype, key=keys[1]) if with_bias else None
    weights = Weights(plain, bias=bias)
    if bits:
        packed, scales, biases = mx.quantize(plain, group, bits)
        weights = Weights(packed, scales, biases, bits, group, bias)
        # Rounded once, as the kernel does it.
        exact = (array.astype(mx.float32) for array in (scales, biases))
        plain = mx.dequantize(packed, *exact, group, bits).astype(dtype)
    assert weights.are_fit
    x = mx.random.normal((sum(counts), INPUTS), dtype, key=keys[2])
    own = mx.array(np.repeat(np.arange(len(counts)), counts).astype(np.uint32))
    with emulated(grouped, backwards):
        actual = grouped_product(x, own, weights)
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
        _check(counts, bits, group, dtype, with_bias=len(counts) > 1, backwards=backwards)


@pytest.mark.slow
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    bits=st.sampled_from([0, 4, 8]),
    backwards=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_any_tokens(counts: list[int], bits: int, backwards: bool) -> None:
    _check(counts, bits, 64, mx.bfloat16, backwards=backwards)


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
