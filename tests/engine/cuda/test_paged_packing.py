"""The kernel of ``packing``, run on the CPU by the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from emulator.sequences import unpacked

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.page_table import PageLists, page_table
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged import packing

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

# Page and slot of each token.
PLACES = [(4, 63), (2, 0), (2, 1), (1, 17), (4, 0), (1, 5)]
HEADS = 3


def _numbers(kind: str, tokens: int, dim: int, dtype: mx.Dtype) -> mx.array:
    rng = np.random.default_rng(dim)
    numbers = rng.normal(size=(tokens, HEADS, 1, dim))
    if kind == "outliers":
        numbers[..., ::37] *= 100
    elif kind == "far from zero":
        numbers = numbers * 0.01 + 7
    elif kind == "equal":
        numbers[:] = rng.normal(size=(tokens, HEADS, 1, 1))
    elif kind == "zeros":
        numbers[:] = 0
    return mx.array(numbers.astype(np.float32)).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("bits", "group", "dim"), [(8, 64, 128), (4, 32, 96), (8, 128, 256)])
@pytest.mark.parametrize("kind", ["normal", "outliers", "far from zero", "equal", "zeros"])
def test_pages_and_step_have_the_same_numbers_close_to_the_keys(
    kind: str, bits: int, group: int, dim: int, dtype: mx.Dtype
) -> None:
    quantization = Quantization(bits, group)
    tokens = len(PLACES)
    new = KeysValues(*(_numbers(kind, tokens, dim + of, dtype)[..., :dim] for of in (0, 1)))
    width = quantization.pack(new.keys).shape[-1]
    shape = (5, HEADS, PAGE_TOKENS, width)
    pool = KeysValues(*(mx.full(shape, 0xABCDEF01, mx.uint32) for _ in range(2)))
    # Every token is the last of a sequence in its second page.
    second = np.array([page for page, _ in PLACES], np.int32)
    lists = PageLists(np.arange(tokens, dtype=np.int32) - 1, second)
    pages = mx.array(page_table(lists, tokens))
    stops = mx.array([PAGE_TOKENS + slot + 1 for _, slot in PLACES], mx.int32)
    owners = mx.arange(tokens, dtype=mx.int32)
    mx.eval(new, pool, pages, stops, owners)
    with emulated(packing, backwards=False):
        result = packing.pack(new, pool, pages, owners, stops, quantization)
    for buffer, numbers, rounded in zip(pool, new, result, strict=True):
        rows = mx.stack([buffer[page, :, slot] for page, slot in PLACES])[:, :, None]
        assert mx.array_equal(rounded, unpacked(rows, quantization, dim, dtype))
        grouped = numbers.astype(mx.float32).reshape(tokens, HEADS, -1, group)
        spread = (grouped.max(-1, keepdims=True) - grouped.min(-1, keepdims=True)) / (2**bits - 1)
        step = mx.broadcast_to(spread, grouped.shape).reshape(numbers.shape)
        # Half a step, and what the scale and the bias lose by their own rounding.
        _check_close(rounded, numbers, 1.1 * step)
        left = np.array(buffer)
        for page, slot in PLACES:
            left[page, :, slot] = 0xABCDEF01
        assert (left == 0xABCDEF01).all(), "it wrote elsewhere"


def _check_close(result: mx.array, expected: mx.array, step: mx.array) -> None:
    """Asserts a difference of a step at most, beside the rounding of numbers of this size."""
    bits = {mx.float32: 22, mx.float16: 9, mx.bfloat16: 6}[result.dtype]
    largest = mx.abs(expected.astype(mx.float32)).max(-1, keepdims=True)
    difference = mx.abs(result.astype(mx.float32) - expected.astype(mx.float32))
    assert mx.all(difference <= step + largest * 2.0**-bits + 1e-6)
