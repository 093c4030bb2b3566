"""Random operations on a batch of full and window layers, against each row's list of tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine.kv import tokens_to_kv

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.snapshot import LayerKind, Snapshot


class RingMachine(RuleBasedStateMachine):
    """Two batches of full and window layers.

    Keys hold their token's number, so that the tokens which a query attends to can be read out and
    compared with the row's own list.
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
                keys, values = layer.update_and_fetch(*tokens_to_kv(padded))
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
        for piece, window in zip(state.layers, self.windows, strict=True):
            tokens = [] if piece is None else np.array(piece.keys[0, 0, :, 0]).tolist()
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
    def batch_and_rows_agree(self) -> None:
        if hasattr(self, "batch"):
            self.batch.check_integrity()
            assert len(self.batch) == len(self.rows)
            assert self.batch.offsets == [len(row) for row in self.rows]


TestRing = RingMachine.TestCase
TestRing.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
