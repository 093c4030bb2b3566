"""Random speculative transactions between joins, leaves and plain steps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.cache.speculation import PACKING, assert_rows_hold, feed

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.snapshot import LayerKind
from chairlift.cache.speculation import Speculation


class SpeculationMachine(RuleBasedStateMachine):
    """A batch and the list of each row's tokens."""

    @initialize(window=st.integers(1, 12), states=st.booleans(), packed=st.booleans())
    def begin(self, window: int, states: bool, packed: bool) -> None:
        kinds = [LayerKind(), LayerKind(window), *[LayerKind(recurrent=True)] * states]
        self.packing = PACKING if packed else None
        self.kinds = [*kinds, LayerKind(window)]
        self.batch = BatchCache(self.kinds, self.packing)
        self.rows: list[list[int]] = []
        self.next_token = 1

    def _fresh(self, length: int) -> np.ndarray:
        count = length * len(self.rows)
        self.next_token += count
        tokens = np.arange(self.next_token - count, self.next_token)
        return tokens.reshape(len(self.rows), length)

    def _step(self, speculation: Speculation, tokens: np.ndarray, real: list[int] | None) -> None:
        """A speculative step; every query sees the window of its row's tokens, drafts included."""
        length = tokens.shape[1]
        with speculation.step(length, real):
            layers = [part for part in self.batch.parts if isinstance(part, LayerCache)]
            masks = [part.make_mask(length, None, True) for part in layers]
            for part, mask, (keys, _) in zip(layers, masks, feed(self.batch, tokens), strict=True):
                seen = np.rint(np.array(keys[:, 0, :, 0]))
                allowed = np.array(
                    mx.broadcast_to(mask, (len(self.rows), 1, length, seen.shape[1]))
                )
                for r, row in enumerate(self.drafted):
                    for q in range(length if real is None else real[r]):
                        expected = [*row, *tokens[r, : q + 1]][-(part.max_size or 10**9) :]
                        assert sorted(seen[r][allowed[r, 0, q]]) == expected
        self.drafted = [
            [*row, *new] for row, new in zip(self.drafted, tokens.tolist(), strict=True)
        ]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), lengths=st.lists(st.integers(1, 8), min_size=1, max_size=2))
    def speculate(self, data: st.DataObject, lengths: list[int]) -> None:
        speculation = Speculation(self.batch)
        self.drafted = [list(row) for row in self.rows]
        steps = [self._fresh(length) for length in lengths]
        written = [sum(lengths)] * len(self.rows)
        for i, step in enumerate(steps):
            real = None
            if self.batch.pads and i == len(steps) - 1 and data.draw(st.booleans()):
                real = [data.draw(st.integers(0, lengths[i])) for _ in self.rows]
                written = [sum(lengths[:i]) + n for n in real]
            self._step(speculation, step, real)
        if data.draw(st.integers(0, 5)) == 0:
            speculation.discard()
            return
        tokens = np.concatenate(steps, axis=1)
        kept = [data.draw(st.sampled_from([0, n]) | st.integers(0, n)) for n in written]
        speculation.commit(kept, lambda start, stop: feed(self.batch, tokens[:, start:stop]))
        for row, new, n in zip(self.rows, tokens.tolist(), kept, strict=True):
            row += new[:n]

    @rule(length=st.integers(0, 30))
    def join(self, length: int) -> None:
        other = BatchCache(self.kinds, self.packing)
        other.join()
        tokens = np.arange(self.next_token, self.next_token + length)[None]
        self.next_token += length
        if length:
            with other.step(length):
                feed(other, tokens)
        self.batch.join(other.extract(0) if length else None)
        self.rows.append(tokens[0].tolist())

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 6))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            tokens = self._fresh(1)
            with self.batch.step(1):
                feed(self.batch, tokens)
            for row, new in zip(self.rows, tokens.tolist(), strict=True):
                row += new

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        rows = data.draw(st.sets(st.integers(0, len(self.rows) - 1), min_size=1))
        self.rows = [self.rows[r] for r in self.batch.leave(rows)]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "batch"):
            assert_rows_hold(self.batch, self.rows, self.packing)


TestSpeculation = pytest.mark.slow(SpeculationMachine.TestCase)
TestSpeculation.settings = settings(
    max_examples=30,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
