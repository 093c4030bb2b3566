"""The kernel of ``put``, run on the CPU by the emulator."""

from __future__ import annotations

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.engine.cuda.paged import put

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
