"""The kernels of ``put`` and ``copy_pages``, run on the CPU by the emulator."""

from __future__ import annotations

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.engine.cuda.paged import copy_pages, put

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_tokens_arrive_in_their_slots(dtype: mx.Dtype) -> None:
    """Parts of wider arrays, in different layouts, go to places in pages, and nothing else does."""
    places = [(4, 63), (2, 0), (2, 1), (0, 17), (4, 0), (1, 5), (1, 4)]
    keys = mx.random.normal((1, 2, 12, 80)).astype(dtype)[:, :, 5:]
    values = mx.random.normal((1, 7, 3, 80)).astype(dtype).swapaxes(1, 2)[:, 1:]
    pool = KeysValues(*(mx.full((5, 2, PAGE_TOKENS, 80), 7, dtype) for _ in range(2)))
    expected = [mx.array(buffer) for buffer in pool]
    for token, (page, slot) in enumerate(places):
        expected[0][page, :, slot] = keys[0, :, token]
        expected[1][page, :, slot] = values[0, :, token]
    slots = mx.array([page * PAGE_TOKENS + slot for page, slot in places], mx.int32)
    mx.eval(keys, values, pool, expected)
    with emulated(put, backwards=False):
        assert put.put(pool, KeysValues(keys, values), slots).tolist() == [1]
    assert mx.array_equal(pool.keys, expected[0])
    assert mx.array_equal(pool.values, expected[1])


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "dims"),
    [
        (mx.bfloat16, 2, (80, 80)),
        (mx.float32, 3, (64, 64)),
        (mx.uint32, 1, (12, 12)),
        (mx.bfloat16, 1, (192, 128)),
        (mx.float16, 1, (1, 3)),
    ],
)
def test_pages_are_copied(
    dtype: mx.Dtype, heads: int, dims: tuple[int, int], backwards: bool
) -> None:
    """Whole pages of keys and values arrive, also of different sizes, and no others change."""
    shapes = [(7, heads, PAGE_TOKENS, dim) for dim in dims]
    pool = KeysValues(*(mx.random.randint(0, 99, shape).astype(dtype) for shape in shapes))
    order = mx.array([0, 1, 6, 3, 1, 5, 6])
    expected = [buffer[order] for buffer in pool]
    pairs = mx.array([(6, 2), (1, 4)], mx.int32)
    mx.eval(pool, expected, pairs)
    with emulated(copy_pages, backwards=backwards):
        assert copy_pages.copy_pages(pool, pairs).tolist() == [1]
    assert all(map(mx.array_equal, pool, expected))
