"""Random operations on a batch, compared with mlx-lm's own caches of one sequence each.

After each operation every row's state is compared bit for bit with mlx-lm caches that took the same
tokens' keys, values and inputs alone. The outputs of each step's attention and recurrence are
compared as well, so that masks are checked, too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.cache.kind_layers import HEADS, KEY_DIM, assert_same_layer, attention, flat, recurrence

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.kinds import make_batch
from chairlift.cache.quantized import HalfPrecision, Quantization
from chairlift.cache.snapshot import Snapshot

GROUP = 32
# Every token of a run is another one, so that all embeddings differ. Padding has huge values: where
# it gets into a result, the result is far off.
VOCABULARY = 4096
PAD = 0
MAX_ROWS = 6
# Bound on rounding where the same sums are computed in another order.
TOLERANCE = 1e-4

_EMBEDDINGS = (
    np.random.default_rng(0).standard_normal((VOCABULARY, HEADS, KEY_DIM)).astype(np.float32)
)
_EMBEDDINGS[PAD] = 1e4


@dataclass
class Row:
    """One sequence: its tokens, and mlx-lm's caches that took them alone."""

    tokens: list[int]
    caches: list[Any]

    def copy(self) -> Row:
        return Row(list(self.tokens), copy.deepcopy(self.caches))


class KindMachine(RuleBasedStateMachine):
    """A batch, and mlx-lm's caches for each of its rows. Subclasses define the kinds of caches."""

    quantization: Quantization | None = None
    half = False

    def model_caches(self) -> list[Any]:
        """The caches that the model's ``make_cache`` returns, and that ours batch."""
        raise NotImplementedError

    def solo_caches(self) -> list[Any]:
        """mlx-lm's caches for one sequence; the model's own, unless they are quantized."""
        return self.model_caches()

    def forward(self, layers: Sequence[Any], tokens: np.ndarray) -> list[mx.array]:
        """A model's forward pass; returns outputs ``[rows, length, ...]``."""
        raise NotImplementedError

    def can_rewind(self, row: int, offset: int) -> bool | None:
        """Whether a row can rewind; None if that depends on the room in its buffers."""
        raise NotImplementedError

    @initialize(
        bits=st.sampled_from([8, 4]),
        window=st.integers(2, 12),
        dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    )
    def begin(self, bits: int, window: int, dtype: mx.Dtype) -> None:
        self.bits, self.window, self.dtype = bits, window, dtype
        self.begin_kind()
        self.embeddings = mx.array(_EMBEDDINGS).astype(dtype)
        self.batch, self.prompts = self._batch(), self._batch()
        self.rows: list[Row] = []
        self.saved: list[tuple[Snapshot, Row]] = []
        self.last = PAD

    def begin_kind(self) -> None:
        """Sets up a kind; ``bits``, ``window`` and ``dtype`` are drawn before."""

    def _batch(self) -> BatchCache:
        storage = HalfPrecision() if self.half else self.quantization
        return make_batch(_Model(self.model_caches()), storage)

    def _fresh(self, count: int) -> list[int]:
        self.last += count
        assert self.last < VOCABULARY
        return list(range(self.last - count + 1, self.last + 1))

    def _step(self, batch: BatchCache, rows: list[Row], length: int, real: list[int]) -> None:
        """Every row, and its solo caches, take ``real[row]`` new tokens, padded to ``length``."""
        new = [self._fresh(n) for n in real]
        with batch.step(length, real):
            padded = np.array([tokens + [PAD] * (length - len(tokens)) for tokens in new])
            together = self.forward(batch.layers, padded)
        for r, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            row.tokens += tokens
            if tokens:
                alone = self.forward(row.caches, np.array([tokens]))
                for ours, theirs in zip(together, alone, strict=True):
                    row_output = ours[r : r + 1, : len(tokens)]
                    assert mx.allclose(row_output, theirs, rtol=TOLERANCE, atol=TOLERANCE)

    @rule(
        lengths=st.lists(st.integers(0, 25), min_size=1, max_size=3),
        chunk=st.integers(1, 9),
        spare=st.sampled_from([0, 40]),
    )
    def join_prompts(self, lengths: list[int], chunk: int, spare: int) -> None:
        """Prompts are computed in chunks, in one batch where it can pad, and join when complete."""
        lengths = lengths[: MAX_ROWS - len(self.rows)]
        groups = [lengths] if self.prompts.pads else [[length] for length in lengths]
        for group in groups:
            self.prompts.reset()
            left = list(group)
            rows = [Row([], self.solo_caches()) for _ in group]
            for _ in group:
                self.prompts.join()
            while rows:
                real = [min(chunk, n) for n in left]
                if max(real):
                    self._step(self.prompts, rows, max(real), real)
                left = [n - done for n, done in zip(left, real, strict=True)]
                self._compare_rows(self.prompts, rows)
                ended = [r for r, n in enumerate(left) if n == 0 or real[r] < max(real)]
                for r in ended:
                    state = self.prompts.extract(r)
                    assert self.batch.join(state, state.stop + spare) == len(self.rows)
                    self.rows.append(rows[r])
                order = self.prompts.leave(ended)
                rows, left = [rows[r] for r in order], [left[r] for r in order]

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule()
    def join_empty(self) -> None:
        self.batch.join()
        self.rows.append(Row([], self.solo_caches()))

    @precondition(lambda self: self.saved and len(self.rows) < MAX_ROWS)
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
        """Rows that end within the step are compared and leave; padding must not enter a state."""
        real = [data.draw(st.integers(0, length)) for _ in self.rows]
        if not self.batch.pads:
            if min(real) < length:
                with pytest.raises(AssertionError, match="padding would enter a state"):
                    self._step(self.batch, [row.copy() for row in self.rows], length, real)
            return
        self._step(self.batch, self.rows, length, real)
        self._compare_rows(self.batch, self.rows)
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
        """Saves a row's state for ``join_saved`` and ``restore``."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state = self.batch.extract(row).copy()
        mx.eval(state.arrays)
        self.saved.append((state, self.rows[row].copy()))

    @precondition(lambda self: self.rows and self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state, saved_row = data.draw(st.sampled_from(self.saved))
        self.batch.restore(row, state)
        self.rows[row] = saved_row.copy()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.rows) - 1))
        row = self.rows[number]
        offset = data.draw(st.integers(0, len(row.tokens)))
        expected = self.can_rewind(number, offset)
        rewound = self.batch.rewind(number, offset)
        assert expected in (None, rewound)
        if rewound:
            row.tokens, row.caches = row.tokens[:offset], self.solo_caches()
            if offset:
                self.forward(row.caches, np.array([row.tokens]))

    @rule(more=st.integers(0, 80), rows=st.integers(0, 3))
    def reserve(self, more: int, rows: int) -> None:
        self.batch.reserve(Capacity(len(self.rows) + rows, self.batch.tokens + more))

    @invariant()
    def rows_equal_their_solo_caches(self) -> None:
        if hasattr(self, "batch"):
            self._compare_rows(self.batch, self.rows)

    def _compare_rows(self, batch: BatchCache, rows: list[Row]) -> None:
        batch.check_integrity()
        assert batch.offsets == [len(row.tokens) for row in rows]
        for number, row in enumerate(rows):
            pieces = batch.extract(number).layers
            for piece, cache in zip(pieces, flat(row.caches), strict=True):
                assert_same_layer(
                    piece, cache, len(row.tokens), self.window, self.quantization, self.dtype
                )

    def attention(self, cache: Any, tokens: np.ndarray) -> mx.array:
        return attention(self.embeddings, cache, tokens, self.quantization)

    def recurrence(self, cache: Any, tokens: np.ndarray) -> mx.array:
        return recurrence(self.embeddings, cache, tokens)


class _Model:
    """The part of a model that ``make_batch`` uses."""

    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches

    def make_cache(self) -> list[Any]:
        return self._caches
