"""Every kind of cache in a batch, against mlx-lm's own caches of one sequence each.

Random operations on a batch; after each, what every row holds is compared bit for bit with caches
of mlx-lm that were fed the same tokens' keys, values and inputs, alone. What a step's attention and
recurrence give is compared as well, so that masks count.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.kinds import make_batch
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import KVPiece, LayerState, Snapshot, StatePiece

HEADS, KEY_DIM, VALUE_DIM, TAIL = 2, 64, 32, 3
GROUP = 32
# Numbers of so many tokens, each unlike all others; the first is padding, and unlike any sane one.
TOKENS = 4096
PAD = 0
MOST_ROWS = 6
# What the same sums in another order may differ by.
CLOSE = 1e-4

_NUMBERS = np.random.default_rng(0).standard_normal((TOKENS, HEADS, KEY_DIM)).astype(np.float32)
_NUMBERS[PAD] = 1e4

Arrays = Sequence[mx.array]


@dataclass
class Row:
    """One sequence: its tokens, and mlx-lm's caches that were fed with them."""

    tokens: list[int]
    caches: list[Any]

    def copy(self) -> Row:
        return Row(list(self.tokens), copy.deepcopy(self.caches))


class KindMachine(RuleBasedStateMachine):
    """A batch, and for each of its rows the same alone. Kinds differ in three methods."""

    quantization: Quantization | None = None

    def wanted(self) -> list[Any]:
        """The caches that the model makes for itself; what ours batches."""
        raise NotImplementedError

    def alone(self) -> list[Any]:
        """mlx-lm's caches for one sequence; those wanted, unless they are quantized."""
        return self.wanted()

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        """What a model does with its caches; outputs ``[rows, ..., length, ...]``, rows first."""
        raise NotImplementedError

    def can_rewind(self, row: int, offset: int) -> bool | None:
        """Whether a row can go back; None if that depends on how much room there happens to be."""
        raise NotImplementedError

    @initialize(
        bits=st.sampled_from([8, 4]),
        window=st.integers(2, 12),
        dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    )
    def begin(self, bits: int, window: int, dtype: mx.Dtype) -> None:
        self.bits, self.window, self.dtype = bits, window, dtype
        self.begin_kind()
        self.numbers = mx.array(_NUMBERS).astype(dtype)
        self.batch, self.prompts = self._batch(), self._batch()
        self.rows: list[Row] = []
        self.saved: list[tuple[Snapshot, Row]] = []
        self.last = PAD

    def begin_kind(self) -> None:
        """What a kind sets up from ``bits``, ``window`` and ``dtype``."""

    def _batch(self) -> BatchCache:
        return make_batch(_Model(self.wanted()), self.quantization)

    def _fresh(self, count: int) -> list[int]:
        self.last += count
        assert self.last < TOKENS
        return list(range(self.last - count + 1, self.last + 1))

    def _step(self, batch: BatchCache, rows: list[Row], length: int, real: list[int]) -> None:
        """Every row takes its own tokens, padded to ``length``, and so does each alone."""
        new = [self._fresh(n) for n in real]
        with batch.step(length, real):
            padded = np.array([tokens + [PAD] * (length - len(tokens)) for tokens in new])
            together = self.forward(batch.layers, padded)
        for r, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            row.tokens += tokens
            if tokens:
                alone = self.forward(row.caches, np.array([tokens]))
                for ours, theirs in zip(together, alone, strict=True):
                    own = ours[r : r + 1, : len(tokens)]
                    assert mx.allclose(own, theirs, rtol=CLOSE, atol=CLOSE)

    @rule(
        lengths=st.lists(st.integers(0, 25), min_size=1, max_size=3),
        chunk=st.integers(1, 9),
        spare=st.sampled_from([0, 40]),
    )
    def join_prompts(self, lengths: list[int], chunk: int, spare: int) -> None:
        """Prompts of these lengths are computed in chunks, side by side where padding is allowed,
        and join.
        """
        lengths = lengths[: MOST_ROWS - len(self.rows)]
        groups = [lengths] if self.prompts.pads else [[length] for length in lengths]
        for group in groups:
            self.prompts.reset()
            left = list(group)
            rows = [Row([], self.alone()) for _ in group]
            for _ in group:
                self.prompts.join()
            while rows:
                real = [min(chunk, n) for n in left]
                if max(real):
                    self._step(self.prompts, rows, max(real), real)
                left = [n - done for n, done in zip(left, real, strict=True)]
                self._compare(self.prompts, rows)
                ended = [r for r, n in enumerate(left) if n == 0 or real[r] < max(real)]
                for r in ended:
                    state = self.prompts.extract(r)
                    assert self.batch.join(state, state.stop + spare) == len(self.rows)
                    self.rows.append(rows[r])
                order = self.prompts.leave(ended)
                rows, left = [rows[r] for r in order], [left[r] for r in order]

    @precondition(lambda self: len(self.rows) < MOST_ROWS)
    @rule()
    def join_empty(self) -> None:
        self.batch.join()
        self.rows.append(Row([], self.alone()))

    @precondition(lambda self: self.saved and len(self.rows) < MOST_ROWS)
    @rule(data=st.data())
    def join_saved(self, data: st.DataObject) -> None:
        state, row = data.draw(st.sampled_from(self.saved))
        self.batch.join(state)
        self.rows.append(row.copy())

    @precondition(lambda self: self.rows)
    @rule(length=st.sampled_from([1, 1, 1, 2, 5]), times=st.integers(1, 3))
    def step(self, length: int, times: int) -> None:
        for _ in range(times):
            self._step(self.batch, self.rows, length, [length] * len(self.rows))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(2, 6))
    def step_with_padding(self, data: st.DataObject, length: int) -> None:
        """Rows that end within it are compared, then leave. No state may see their padding."""
        real = [data.draw(st.integers(0, length)) for _ in self.rows]
        if not self.batch.pads:
            if min(real) < length:
                with pytest.raises(AssertionError, match="padding would enter a state"):
                    self._step(self.batch, [row.copy() for row in self.rows], length, real)
            return
        self._step(self.batch, self.rows, length, real)
        self._compare(self.batch, self.rows)
        self._leave([r for r, n in enumerate(real) if n < length])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._leave(sorted(data.draw(st.sets(st.integers(0, len(self.rows) - 1), min_size=1))))

    def _leave(self, rows: list[int]) -> None:
        order = self.batch.leave(rows)
        assert sorted(order) == [r for r in range(len(self.rows)) if r not in rows]
        self.rows = [self.rows[r] for r in order]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        """Kept, to be put back later, whatever has become of the row."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state = self.batch.extract(row).copy()
        mx.eval(state.arrays)
        self.saved.append((state, self.rows[row].copy()))

    @precondition(lambda self: self.rows and self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state, then = data.draw(st.sampled_from(self.saved))
        self.batch.restore(row, state)
        self.rows[row] = then.copy()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.rows) - 1))
        row = self.rows[number]
        offset = data.draw(st.integers(0, len(row.tokens)))
        expected = self.can_rewind(number, offset)
        done = self.batch.rewind(number, offset)
        assert expected in (None, done)
        if done:
            row.tokens, row.caches = row.tokens[:offset], self.alone()
            if offset:
                self.forward(row.caches, np.array([row.tokens]))

    @rule(more=st.integers(0, 80), rows=st.integers(0, 3))
    def reserve(self, more: int, rows: int) -> None:
        self.batch.reserve(Capacity(len(self.rows) + rows, self.batch.tokens + more))

    @invariant()
    def holds_what_each_holds_alone(self) -> None:
        if hasattr(self, "batch"):
            self._compare(self.batch, self.rows)

    def _compare(self, batch: BatchCache, rows: list[Row]) -> None:
        batch.check_integrity()
        assert batch.offsets == [len(row.tokens) for row in rows]
        for number, row in enumerate(rows):
            pieces = batch.extract(number).layers
            for piece, cache in zip(pieces, _flat(row.caches), strict=True):
                self._compare_layer(piece, cache, len(row.tokens))

    def _compare_layer(self, piece: LayerState | None, cache: Any, tokens: int) -> None:
        if isinstance(cache, ArraysCache):
            slots = piece.slots if isinstance(piece, StatePiece) else [None] * len(cache.cache)
            _assert_same_states(slots, cache.cache)
            return
        least = min(tokens, self.window - 1) if isinstance(cache, RotatingKVCache) else tokens
        if not least:
            return
        assert isinstance(piece, KVPiece)
        assert piece.tokens >= least
        for packed, theirs in zip(piece.newest(least).arrays, _held(cache), strict=True):
            if self.quantization is None:
                assert np.array_equal(_bits(packed), _bits(theirs))
            else:
                self._compare_packed(packed, theirs, least)

    def _compare_packed(self, packed: mx.array, theirs: Any, tokens: int) -> None:
        """Codes, scales and biases are MLX's, and so is what they stand for."""
        assert self.quantization is not None
        bits, group = self.quantization.bits, self.quantization.group
        if not isinstance(theirs, tuple):
            theirs = mx.quantize(theirs[:, :, -tokens:], group_size=group, bits=bits)
        codes = theirs[0].shape[-1]
        scales, biases = mx.split(packed[..., codes:].view(self.dtype), 2, axis=-1)
        ours = (packed[..., :codes], scales, biases)
        for mine, other in zip(ours, theirs, strict=True):
            assert np.array_equal(_bits(mine), _bits(other))
        read = self.quantization.unpack(packed, codes * 32 // bits, self.dtype)
        meant = mx.dequantize(*theirs, group_size=group, bits=bits)
        assert np.array_equal(_bits(read), _bits(meant))

    def attention(self, cache: Any, tokens: np.ndarray) -> mx.array:
        """``[rows, length, heads, dim]``, of what the cache gives, in float32."""
        hidden = self.numbers[mx.array(tokens)]
        queries = hidden.swapaxes(1, 2)
        mask = create_attention_mask(hidden, cache)
        fetched = cache.update_and_fetch(queries[..., ::-1], queries[..., :VALUE_DIM] - 0.5)
        if isinstance(cache, QuantizedKVCache | RotatingKVCache):
            fetched = [self._rounded(numbers) for numbers in fetched]
        queries, keys, values = (array.astype(mx.float32) for array in (queries, *fetched))
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=KEY_DIM**-0.5, mask=mask
        )
        return out.swapaxes(1, 2)

    def _rounded(self, numbers: Any) -> mx.array:
        """What is left of numbers in so many bits; mlx-lm may have them as codes already."""
        assert self.quantization is not None
        options = {"group_size": self.quantization.group, "bits": self.quantization.bits}
        if isinstance(numbers, mx.array):
            numbers = mx.quantize(numbers, **options)
        return mx.dequantize(*numbers, **options)

    def recurrence(self, cache: Any, tokens: np.ndarray) -> mx.array:
        """``[rows, length, dim]``: slot 0 is a convolution's tail, slot 1 a state that decays."""
        inputs = self.numbers[mx.array(tokens)][:, :, 0]
        tail, state = cache[0], cache[1]
        if tail is None:
            tail = mx.zeros((len(tokens), TAIL, KEY_DIM), self.dtype)
        if state is None:
            state = mx.zeros((len(tokens), KEY_DIM), mx.float32)
        inputs = mx.concatenate([tail, inputs], axis=1)
        outputs = []
        for i in range(tokens.shape[1]):
            mixed = inputs[:, i] - inputs[:, i + 1] * 0.5 + inputs[:, i + TAIL] * 0.25
            state = state * 0.75 + mixed
            outputs.append(state)
        cache[0], cache[1] = inputs[:, -TAIL:], state
        return mx.stack(outputs, axis=1)


class QuantizedMachine(KindMachine):
    """Full attention in 8 or 4 bits. Quantization goes token by token, head by head: that a token's
    codes, scales and biases lie side by side here, and in three arrays there, changes no bit.
    """

    def begin_kind(self) -> None:
        self.quantization = Quantization(self.bits, GROUP)

    def wanted(self) -> list[Any]:
        return [KVCache()]

    def alone(self) -> list[Any]:
        return [QuantizedKVCache(GROUP, self.bits)]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.attention(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        return True


class QuantizedWindowMachine(KindMachine):
    """A sliding window in 8 or 4 bits; mlx-lm cannot quantize one, so its content is."""

    def begin_kind(self) -> None:
        self.quantization = Quantization(self.bits, GROUP)

    def wanted(self) -> list[Any]:
        return [RotatingKVCache(self.window)]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.attention(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        length = len(self.rows[row].tokens)
        if length < self.window or offset in (0, length):
            return True
        lost = length - self.batch.parts[0].ring.columns  # or more: room may be new
        return False if lost > max(0, offset - self.window + 1) else None


class StateMachine(KindMachine):
    """A recurrent layer, whose state nothing but a row's own tokens may enter."""

    def wanted(self) -> list[Any]:
        return [ArraysCache(2)]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        return [self.recurrence(layers[0], tokens)]

    def can_rewind(self, row: int, offset: int) -> bool | None:
        return offset in (0, len(self.rows[row].tokens))


class NestedMachine(StateMachine):
    """Attention and recurrence in one layer, as hybrid models nest them."""

    def wanted(self) -> list[Any]:
        return [CacheList(KVCache(), ArraysCache(2)), KVCache()]

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        both, after = layers
        assert type(both) is CacheList
        kv, arrays = both[0], both[1]
        return [
            self.recurrence(arrays, tokens),
            self.attention(kv, tokens),
            self.attention(after, tokens),
        ]


class _Model:
    """All that ``make_batch`` asks of a model."""

    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches

    def make_cache(self) -> list[Any]:
        return self._caches


def _flat(caches: Sequence[Any]) -> list[Any]:
    return [
        part
        for cache in caches
        for part in (cache.caches if isinstance(cache, CacheList) else [cache])
    ]


def _held(cache: Any) -> tuple[Any, Any]:
    """Keys and values, oldest first; a quantized cache's as codes, scales and biases."""
    if isinstance(cache, RotatingKVCache):
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    if isinstance(cache, QuantizedKVCache):
        keys, values = cache.keys_and_values()
        return tuple(keys), tuple(values)
    return cache.keys[:, :, : cache.offset], cache.values[:, :, : cache.offset]


def _assert_same_states(ours: Sequence[mx.array | None], theirs: Arrays) -> None:
    """Bit for bit; zeros are what a model takes None for."""
    for one, two in zip(ours, theirs, strict=True):
        if one is None or two is None:
            assert all(slot is None or not slot.any() for slot in (one, two))
        else:
            assert np.array_equal(_bits(one), _bits(two))


def _bits(array: mx.array) -> np.ndarray:
    """The memory of an array, so that equal means equal to the bit."""
    words = {4: mx.uint32, 2: mx.uint16}[array.dtype.size]
    return np.array(array.view(words))


BOUNDED = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestQuantized = QuantizedMachine.TestCase
TestQuantizedWindow = QuantizedWindowMachine.TestCase
TestState = StateMachine.TestCase
TestNested = NestedMachine.TestCase
TestQuantized.settings = TestQuantizedWindow.settings = BOUNDED
TestState.settings = TestNested.settings = BOUNDED
