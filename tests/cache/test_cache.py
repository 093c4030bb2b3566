"""The batched caches: against a list of tokens a row, and against mlx-lm's own caches."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from support.engine.kv import HEADS, KEY_DIM, VALUE_DIM, _tokens_to_kv
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity, KVGeometry, bucket, resized
from chairlift.cache.kinds import UnsupportedKind, layer_kinds, make_batch
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import LayerKind, Snapshot


class RingMachine(RuleBasedStateMachine):
    """Two batches of full and window layers; every row's tokens are numbered, so that what a query
    would attend to can be read out and compared with the row's own list.
    """

    @initialize(window=st.integers(1, 12))
    def begin(self, window: int) -> None:
        self.windows = [None, window, None, window]
        self.batch = BatchCache([LayerKind(window) for window in self.windows])
        self.other = BatchCache([LayerKind(window) for window in self.windows])
        self.rows: list[list[int]] = []
        self.next_token = 1

    def _fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def _step(self, batch: BatchCache, rows: list[list[int]], length: int, real: list[int]) -> None:
        new = [self._fresh(n) for n in real]
        padded = np.array([t + [0] * (length - len(t)) for t in new])
        before = [list(row) for row in rows]
        with batch.step(length, real):
            for layer, window in zip(batch.layers, self.windows, strict=True):
                assert layer.offset.tolist() == [len(row) for row in before]
                mask = layer.make_mask(length, window_size=window, return_array=True)
                keys, values = layer.update_and_fetch(*_tokens_to_kv(padded))
                seen = np.array(keys[:, 0, :, 0])
                allowed = np.array(mx.broadcast_to(mask, (len(rows), 1, length, seen.shape[1])))
                assert np.array_equal(np.array(values[:, 0, :, 0]), -seen)
                for r, row in enumerate(before):
                    for q in range(len(new[r])):
                        expected = (row + new[r][: q + 1])[-(window or 10**9) :]
                        assert sorted(seen[r][allowed[r, 0, q]]) == expected
        for row, tokens in zip(rows, new, strict=True):
            row += tokens

    @rule(length=st.integers(0, 30), chunk=st.integers(1, 9))
    def prefill_and_join(self, length: int, chunk: int) -> None:
        """A prompt is computed in the other batch, beside a second one, and joins."""
        self.other.reset()
        prompts: list[list[int]] = [[], []]
        lengths = [length, length // 2]
        for _ in prompts:
            self.other.join()
        states: list[Snapshot] = []
        while prompts:
            real = [min(chunk, n - len(p)) for n, p in zip(lengths, prompts, strict=True)]
            if max(real):
                self._step(self.other, prompts, max(real), real)
            done = [r for r, n in enumerate(lengths) if len(prompts[r]) == n or real[r] < max(real)]
            for r in done:
                states.append(self.other.extract(r))
                self.rows.append(list(prompts[r]))
            order = self.other.leave(set(done))
            prompts = [prompts[r] for r in order]
            lengths = [lengths[r] for r in order]
            self.other.check_integrity()
        for state in states:
            assert self.batch.join(state) == len(self.batch) - 1

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 12))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._step(self.batch, self.rows, 1, [1] * len(self.rows))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        rows = data.draw(st.sets(st.integers(0, len(self.rows) - 1), min_size=1))
        order = self.batch.leave(rows)
        assert sorted(order) == [r for r in range(len(self.rows)) if r not in rows]
        self.rows = [self.rows[r] for r in order]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state = self.batch.extract(row)
        assert state.stop == len(self.rows[row])
        for held, window in zip(state.layers, self.windows, strict=True):
            tokens = [] if held is None else np.array(held.keys[0, 0, :, 0]).tolist()
            assert tokens == self.rows[row][-(window or 10**9) :]

    @rule(more=st.integers(0, 200), rows=st.integers(0, 5))
    def reserve(self, more: int, rows: int) -> None:
        self.batch.reserve(Capacity(len(self.rows) + rows, self.batch.tokens + more))

    @rule()
    def reset(self) -> None:
        self.batch.reset()
        self.rows = []
        assert self.batch.nbytes == 0

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "batch"):
            self.batch.check_integrity()
            assert len(self.batch) == len(self.rows)
            assert self.batch.offsets == [len(row) for row in self.rows]


TestRing = RingMachine.TestCase
TestRing.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


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
    expected = [solo_tokens(model, p, n) for p, n in zip(prompts, counts, strict=True)]
    assert len({tuple(tokens[:2]) for tokens in expected}) > 1, "the models say one thing only"
    batch = make_batch(model)
    waiting, rows, got = list(range(len(prompts))), [], [[] for _ in prompts]
    while waiting or rows:
        if waiting and (not rows or random_.random() < 0.4):
            new = waiting.pop(0)
            batch.join(_prefilled(model, prompts[new][:-1], random_.choice([3, 16, 64])))
            rows.append(new)
        inputs = [(got[r] or prompts[r])[-1] for r in rows]
        with batch.step(1):
            logits = model(mx.array(inputs)[:, None], cache=batch.layers)[:, -1]
        for r, token in zip(rows, mx.argmax(logits, axis=-1).tolist(), strict=True):
            got[r].append(token)
        order = batch.leave({i for i, r in enumerate(rows) if len(got[r]) == counts[r]})
        rows = [rows[i] for i in order]
        batch.check_integrity()
    assert got == expected


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
            layer.update_and_fetch(*_tokens_to_kv(np.arange(tokens)[None]))
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
    """Built, waited for, dispatched: no step copies its buffers, nor do rows that move."""
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
        layer.update_and_fetch(*_tokens_to_kv(np.arange(8).reshape(2, 4)))
    with batch.step(1):
        assert layer.make_mask(1) is None
        layer.update_and_fetch(*_tokens_to_kv(np.arange(2).reshape(2, 1)))
    batch.join()
    with batch.step(1):
        assert layer.make_mask(1).tolist() == [[[[True] * 6]]] * 2 + [[[[False] * 5 + [True]]]]
        layer.update_and_fetch(*_tokens_to_kv(np.arange(3).reshape(3, 1)))


def test_the_geometry_is_the_buffers_bytes() -> None:
    batch = BatchCache([LayerKind(), LayerKind(8), LayerKind()])
    batch.join()
    for count in (40, 1, 1):
        with batch.step(count):
            for layer in batch.layers:
                layer.update_and_fetch(*_tokens_to_kv(np.zeros((1, count))))
    geometry = batch.geometry()
    token = HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert geometry == KVGeometry(2 * token, {8: token}, 0, {None: token, 8: token})
    assert batch.nbytes == geometry.reserved(batch.capacity, step=40)
    assert geometry.used([3, 20]) == (3 + 20) * 2 * token + (3 + 8) * token


# What the allocator adds to the buffers of two layers, up to a page each.
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
def test_moving_to_other_buffers_takes_what_is_counted(
    windows: tuple[int | None, ...], now: Capacity, then: Capacity
) -> None:
    batch = BatchCache([LayerKind(window) for window in windows])
    batch.join()
    batch.resize(now)
    with batch.step(1):
        for layer in batch.layers:
            layer.update_and_fetch(*_tokens_to_kv(np.zeros((1, 1))))
    mx.eval(batch.state)
    geometry = batch.geometry()
    base = mx.get_active_memory() - batch.nbytes
    mx.reset_peak_memory()
    batch.resize(then)
    peak = mx.get_peak_memory() - base
    counted = geometry.moved(now, then)
    assert max(geometry.reserved(now), geometry.reserved(then)) < peak <= counted + PAGES
    largest = max(c.rows * c.columns for c in (now, then)) * geometry.layer_bytes[None]
    assert peak > counted - largest, "no more than one layer too many"


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
    assert resized(Capacity(1, 100), roomy) == Capacity(4, 128)


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
        layer_kinds(Model())


def test_what_grows_is_held_twice_one_layer_at_a_time() -> None:
    batch = BatchCache([LayerKind()] * 8)
    for _ in range(4):
        batch.join(columns=4_000)
    with batch.step(1):
        for layer in batch.layers:
            layer.update_and_fetch(*_tokens_to_kv(np.zeros((4, 1), np.int32)))
    mx.eval(batch.state)
    old, before = batch.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    batch.resize(Capacity(4, 8_000))
    mx.eval(batch.state)
    assert batch.nbytes >= 1.9 * old
    assert mx.get_peak_memory() - before <= batch.nbytes - old + 1.1 * batch.nbytes / 8


def test_a_join_takes_the_joiners_bytes_and_no_more() -> None:
    """Peak memory of a join beside 15 rows, with and without quantization; nothing has to grow."""
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
