"""Batches: rows that join and leave, masks, steps in place, and the memory that they take."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from support.engine.kv import HEADS, KEY_DIM, VALUE_DIM, tokens_to_kv
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity, KVGeometry, bucket, resized, row_bucket
from chairlift.cache.kinds import UnsupportedKind, make_batch
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import LayerKind, Snapshot


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_join_and_leave_give_their_solo_tokens(kind: TinyKind, seed: int) -> None:
    """Random joins, leaves and chunk lengths; gemma3's window (16) is shorter than the prompts."""
    random_ = random.Random(seed)
    model = tiny_model(kind, seed)
    prompts = [
        [random_.randrange(3, 250) for _ in range(random_.choice([1, 5, 17, 60, 150]))]
        for _ in range(9)
    ]
    counts = [random_.randrange(2, 40) for _ in prompts]
    batch = make_batch(model)
    waiting, rows, generated = list(range(len(prompts))), [], [[] for _ in prompts]
    while waiting or rows:
        if waiting and (not rows or random_.random() < 0.4):
            new = waiting.pop(0)
            batch.join(_prefilled(model, prompts[new][:-1], random_.choice([3, 16, 64])))
            rows.append(new)
        inputs = [(generated[r] or prompts[r])[-1] for r in rows]
        with batch.step(1):
            logits = model(mx.array(inputs)[:, None], cache=batch.layers)[:, -1]
        for r, token in zip(rows, mx.argmax(logits, axis=-1).tolist(), strict=True):
            generated[r].append(token)
        order = batch.leave({i for i, r in enumerate(rows) if len(generated[r]) == counts[r]})
        rows = [rows[i] for i in order]
        batch.check_integrity()
    for prompt, count, tokens in zip(prompts, counts, generated, strict=True):
        assert tokens == solo_tokens(model, prompt, count, tokens)
    assert len({tuple(tokens[:2]) for tokens in generated}) > 1, (
        "the models always give the same tokens"
    )


def _prefilled(model: nn.Module, tokens: list[int], chunk: int) -> Snapshot:
    cache = make_batch(model)
    cache.join()
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        with cache.step(len(part)):
            model(mx.array([part]), cache=cache.layers)
    return cache.extract(0)


def _random_state(tokens: int) -> Snapshot:
    batch = BatchCache([LayerKind(), LayerKind(8)])
    batch.join(columns=tokens)
    with batch.step(tokens):
        for layer in batch.layers:
            layer.update_and_fetch(*tokens_to_kv(np.arange(tokens)[None]))
    return batch.extract(0)


def test_joining_and_leaving_touch_no_other_row() -> None:
    batch = BatchCache([LayerKind(), LayerKind(8)])
    batch.reserve(Capacity(8, 64))
    for tokens in (5, 20, 11):
        batch.join(_random_state(tokens))
    before = [np.array(array[:3]) for array in batch.state]
    batch.join(_random_state(30))
    _assert_rows_equal(before, batch.state, [0, 1, 2])
    assert batch.leave({1}) == [0, 3, 2]
    _assert_rows_equal(before, batch.state, [0, 2])
    assert np.array(batch.extract(1).layers[0].keys)[0, 0, :, 0].tolist() == list(range(30))


def _assert_rows_equal(before: list[np.ndarray], after: list[mx.array], rows: list[int]) -> None:
    for old, new in zip(before, after, strict=True):
        for row in rows:
            assert np.array_equal(old[row], np.array(new[row]))


def test_a_step_writes_in_place() -> None:
    """While one step runs the next is built; neither copies its buffers, nor do rows that move."""
    batch = BatchCache([LayerKind(), LayerKind(8)])
    for _ in range(8):
        batch.join(_random_state(8), columns=20_000)

    def step() -> mx.array:
        kv = mx.ones((len(batch), HEADS, 1, KEY_DIM)), mx.ones((len(batch), HEADS, 1, VALUE_DIM))
        with batch.step(1):
            read = [array for layer in batch.layers for array in layer.update_and_fetch(*kv)]
        return mx.stack([array[..., -1, :].sum() for array in read])

    running = step()
    mx.eval(running)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for count in range(6):
        if count == 3:
            batch.leave({0, 2})
        moves = batch.take_moves()
        built = step()
        mx.eval(running)
        mx.eval(moves)
        mx.async_eval(built)
        running = built
    mx.eval(running)
    assert mx.get_peak_memory() - base < batch.nbytes / 4


def test_masks_are_none_or_causal_where_nothing_is_hidden() -> None:
    batch = BatchCache([LayerKind()])
    batch.join()
    batch.join()
    layer = batch.layers[0]
    with batch.step(4):
        assert layer.make_mask(4) == "causal"
        assert isinstance(layer.make_mask(4, return_array=True), mx.array)
        assert layer.make_mask(4, window_size=2) != "causal"
        layer.update_and_fetch(*tokens_to_kv(np.arange(8).reshape(2, 4)))
    with batch.step(1):
        assert layer.make_mask(1) is None
        layer.update_and_fetch(*tokens_to_kv(np.arange(2).reshape(2, 1)))
    batch.join()
    with batch.step(1):
        assert layer.make_mask(1).tolist() == [[[[True] * 6]]] * 2 + [[[[True] + [False] * 5]]]
        layer.update_and_fetch(*tokens_to_kv(np.arange(3).reshape(3, 1)))


def test_the_geometry_counts_the_bytes_of_the_buffers() -> None:
    batch = BatchCache([LayerKind(), LayerKind(8), LayerKind()])
    batch.join()
    for count in (40, 1, 1):
        with batch.step(count):
            for layer in batch.layers:
                layer.update_and_fetch(*tokens_to_kv(np.zeros((1, count))))
    geometry = batch.geometry()
    token = HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert geometry == KVGeometry(2 * token, {8: token}, 0, {None: token, 8: token})
    assert batch.nbytes == geometry.reserved(batch.capacity, step=40)
    assert geometry.used([3, 20]) == (3 + 20) * 2 * token + (3 + 8) * token


# Bound on what the allocator adds to the buffers of two layers: a page each.
PAGES = 4 * 4096


@pytest.mark.parametrize("windows", [(None, None), (None, 8, 8, None)])
@pytest.mark.parametrize(
    ("now", "then"),
    [
        (Capacity(4, 512), Capacity(8, 1024)),
        (Capacity(8, 1024), Capacity(4, 512)),
        (Capacity(4, 2048), Capacity(64, 128)),
        (Capacity(64, 128), Capacity(4, 4096)),
    ],
)
def test_moving_to_other_buffers_takes_the_memory_that_geometry_counts(
    windows: tuple[int | None, ...], now: Capacity, then: Capacity
) -> None:
    batch = BatchCache([LayerKind(window) for window in windows])
    batch.join()
    batch.resize(now)
    with batch.step(1):
        for layer in batch.layers:
            layer.update_and_fetch(*tokens_to_kv(np.zeros((1, 1))))
    mx.eval(batch.state)
    geometry = batch.geometry()
    base = mx.get_active_memory() - batch.nbytes
    mx.reset_peak_memory()
    batch.resize(then)
    peak = mx.get_peak_memory() - base
    counted = geometry.moved(now, then)
    assert max(geometry.reserved(now), geometry.reserved(then)) < peak <= counted + PAGES
    largest = max(c.rows * c.columns for c in (now, then)) * geometry.layer_bytes[None]
    assert peak > counted - largest, "geometry counts at most one layer too many"


def test_capacity_grows_by_a_quarter_and_shrinks_late() -> None:
    assert [bucket(n, 64) for n in (0, 1, 64, 65, 257, 1000, 4097)] == [
        0,
        64,
        64,
        128,
        320,
        1024,
        5120,
    ]
    for need in range(1, 3000, 7):
        assert need <= bucket(need, 4) <= max(need + 4, need * 1.25 + 1)
    roomy = Capacity(128, 4096)
    assert resized(Capacity(8, 1024), roomy) == roomy
    assert resized(Capacity(1, 100), roomy) == Capacity(1, 128)
    assert [row_bucket(n) for n in (0, 1, 2, 3, 4, 5, 33)] == [0, 1, 2, 4, 4, 8, 40]


@pytest.mark.parametrize(
    ("caches", "named"),
    [
        ([KVCache(), CacheList(KVCache(), QuantizedKVCache())], "QuantizedKVCache"),
        ([RotatingKVCache(8, keep=4)], "4 tokens kept"),
    ],
)
def test_other_kinds_are_refused_by_name(caches: list[Any], named: str) -> None:
    class Model:
        layers = caches

        def make_cache(self) -> list[Any]:
            return caches

    with pytest.raises(UnsupportedKind, match=named):
        make_batch(Model())


def test_growing_buffers_exist_twice_one_layer_at_a_time() -> None:
    batch = BatchCache([LayerKind()] * 8)
    for _ in range(4):
        batch.join(columns=4_000)
    with batch.step(1):
        for layer in batch.layers:
            layer.update_and_fetch(*tokens_to_kv(np.zeros((4, 1), np.int32)))
    mx.eval(batch.state)
    old, before = batch.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    batch.resize(Capacity(4, 8_000))
    mx.eval(batch.state)
    assert batch.nbytes >= 1.9 * old
    assert mx.get_peak_memory() - before <= batch.nbytes - old + 1.1 * batch.nbytes / 8


def test_a_join_takes_the_bytes_of_the_joining_row_and_no_more() -> None:
    """Peak memory of a join beside 15 rows, with and without quantization; no buffer grows."""
    for quantization in (None, Quantization(8, 32)):
        batch = BatchCache([LayerKind(), LayerKind(64)] * 2, quantization)
        single = BatchCache([LayerKind(), LayerKind(64)] * 2, quantization)
        single.join(columns=512)
        with single.step(500):
            for layer in single.layers:
                layer.update_and_fetch(*mx.random.normal((2, 1, 4, 500, 64)))
        joiner = single.extract(0).copy()
        mx.eval(joiner.arrays)
        batch.resize(Capacity(16, 512))
        for _ in range(15):
            batch.join(joiner)
        mx.eval(batch.state)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        batch.join(joiner)
        mx.eval(batch.state)
        assert mx.get_peak_memory() - before <= 1.05 * joiner.nbytes
        assert mx.get_active_memory() == before


@pytest.mark.parametrize("rows", [1, 4])
def test_buffers_that_lose_rows_free_their_memory_at_once(rows: int) -> None:
    """Full windows fill the new buffers, too, so nothing of these is left to zeros."""
    batch = BatchCache([LayerKind(64)] * 2)
    for _ in range(32):
        batch.join(columns=100)
    for _ in range(64):
        with batch.step(1):
            for layer in batch.layers:
                layer.update_and_fetch(*mx.ones((2, 32, 4, 1, 64)))
        mx.eval(batch.state)
    batch.leave(range(rows, 32))
    other = mx.get_active_memory() - batch.nbytes
    batch.resize(Capacity(rows, 100))
    assert mx.get_active_memory() - other <= batch.nbytes + (16 << 10)
