"""Speculation: what rows keep is what they would hold had they taken it token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine.reference import solo_tokens
from support.tiny import tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.cache.layer import LayerCache
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece
from chairlift.cache.speculation import NeedsReplay, Speculation, SpeculationError, logical_view
from chairlift.cache.state import StateLayer

HEADS, DIM = 2, 32
PACKING = Quantization(bits=8, group=32)


def _kv(tokens: np.ndarray) -> tuple[mx.array, mx.array]:
    """Keys and values ``[rows, heads, length, dim]``; a key's first number is its token's."""
    lanes = np.arange(HEADS)[:, None, None] / 4 + np.arange(DIM) / 64
    keys = (tokens[:, None, :, None] + lanes).astype(np.float32)
    return mx.array(keys), mx.array(-keys[..., ::-1])


def _stepped(state: mx.array, tokens: np.ndarray) -> mx.array:
    """A recurrence ``[rows, 3]`` that no token leaves without a trace, the same in any chunks."""
    for i in range(tokens.shape[1]):
        state = state * 0.5 + mx.array(tokens[:, i : i + 1].astype(np.float32)) * mx.array(
            [1, 2, 3]
        )
    return state


def _feed(batch: BatchCache, tokens: np.ndarray) -> list[tuple[mx.array, mx.array]]:
    """A model's forward, as far as caches see it; returns what each attention layer gives."""
    given = []
    for part in batch.parts:
        if isinstance(part, LayerCache):
            given.append(part.update_and_fetch(*_kv(tokens)))
        else:
            state = part[0]
            part[0] = _stepped(mx.zeros((len(tokens), 3)) if state is None else state, tokens)
    return given


def _assert_holds(batch: BatchCache, rows: Sequence[Sequence[int]], packing: Any = None) -> None:
    """Every row's offset, keys, values and states are those of its tokens, to the bit."""
    batch.check_integrity()
    assert batch.offsets == [len(row) for row in rows]
    for r, row in enumerate(rows):
        snapshot = batch.extract(r)
        for kind, piece in zip(batch.kinds, snapshot.layers, strict=True):
            tokens = np.array([row]).reshape(1, -1)
            if kind.recurrent:
                state = np.array(_stepped(mx.zeros((1, 3)), tokens))
                held = np.zeros_like(state) if piece is None else np.array(piece.slots[0])
                assert np.array_equal(held, state)
                continue
            wanted = min(len(row), kind.window or len(row))
            assert (piece.tokens if piece else 0) >= wanted
            if piece is not None:
                for array, expected in zip(piece.newest(wanted).arrays, _kv(tokens), strict=True):
                    expected = expected[:, :, len(row) - wanted :]
                    expected = packing.pack(expected) if packing else expected
                    assert np.array_equal(np.array(array), np.array(expected))


class SpeculationMachine(RuleBasedStateMachine):
    """Random transactions between joins, leaves and plain steps; each row's tokens are listed."""

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
        """A tentative step; every query must see its window of what its row has come to be."""
        length = tokens.shape[1]
        with speculation.step(length, real):
            layers = [part for part in self.batch.parts if isinstance(part, LayerCache)]
            masks = [part.make_mask(length, None, True) for part in layers]
            for part, mask, (keys, _) in zip(layers, masks, _feed(self.batch, tokens), strict=True):
                seen = np.rint(np.array(keys[:, 0, :, 0]))
                allowed = np.array(
                    mx.broadcast_to(mask, (len(self.rows), 1, length, seen.shape[1]))
                )
                for r, row in enumerate(self.shown):
                    for q in range(length if real is None else real[r]):
                        expected = [*row, *tokens[r, : q + 1]][-(part.max_size or 10**9) :]
                        assert sorted(seen[r][allowed[r, 0, q]]) == expected
        self.shown = [[*row, *new] for row, new in zip(self.shown, tokens.tolist(), strict=True)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), lengths=st.lists(st.integers(1, 8), min_size=1, max_size=2))
    def speculate(self, data: st.DataObject, lengths: list[int]) -> None:
        speculation = Speculation(self.batch)
        self.shown = [list(row) for row in self.rows]
        steps = [self._fresh(length) for length in lengths]
        own = [sum(lengths)] * len(self.rows)
        for i, step in enumerate(steps):
            real = None
            if self.batch.pads and i == len(steps) - 1 and data.draw(st.booleans()):
                real = [data.draw(st.integers(0, lengths[i])) for _ in self.rows]
                own = [sum(lengths[:i]) + n for n in real]
            self._step(speculation, step, real)
        if data.draw(st.integers(0, 5)) == 0:
            speculation.discard()
            return
        tokens = np.concatenate(steps, axis=1)
        kept = [data.draw(st.sampled_from([0, n]) | st.integers(0, n)) for n in own]
        speculation.commit(kept, lambda start, stop: _feed(self.batch, tokens[:, start:stop]))
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
                _feed(other, tokens)
        self.batch.join(other.extract(0) if length else None)
        self.rows.append(tokens[0].tolist())

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 6))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            tokens = self._fresh(1)
            with self.batch.step(1):
                _feed(self.batch, tokens)
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
            _assert_holds(self.batch, self.rows, self.packing)


TestSpeculation = SpeculationMachine.TestCase
TestSpeculation.settings = settings(
    max_examples=50,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": lambda seed: tiny_model("llama", seed),
    "gemma3": lambda seed: tiny_model("gemma3", seed),
    "gemma3, window 3": lambda seed: tiny_model("gemma3", seed, sliding_window=3),
    "lfm2": lambda seed: tiny_model("lfm2", seed),
}


def _prefilled(model: nn.Module, tokens: Sequence[int]) -> Snapshot | None:
    batch = make_batch(model)
    batch.join()
    if not tokens:
        return None
    with batch.step(len(tokens)):
        model(mx.array([tokens]), cache=batch.layers)
    return batch.extract(0)


@pytest.mark.parametrize("name", MODELS)
def test_random_drafts_give_the_solo_tokens(name: str) -> None:
    """Greedy: a row keeps the token fed and the drafts that the model would have said itself."""
    model, random_ = MODELS[name](1), random.Random(5)
    prompts = [[random_.randrange(3, 250) for _ in range(n)] for n in (1, 30, 7, 50)]
    counts = [20, 35, 28, 12]
    expected = [solo_tokens(model, p, n) for p, n in zip(prompts, counts, strict=True)]
    assert len({tuple(tokens[:3]) for tokens in expected}) > 1, "the model says one thing only"
    batch = make_batch(model)
    speculation = Speculation(batch)
    waiting, rows, got = list(range(len(prompts))), [], [[] for _ in prompts]
    while waiting or rows:
        if waiting and (not rows or random_.random() < 0.3):
            batch.join(_prefilled(model, prompts[waiting[0]][:-1]))
            rows.append(waiting.pop(0))
        length = random_.choice([1, 3, 5])
        fed = []
        for r in rows:
            wanted = (expected[r] + [0] * length)[len(got[r]) :][: length - 1]
            drafts = [t if random_.random() < 0.7 else random_.randrange(250) for t in wanted]
            fed.append([(got[r] or prompts[r])[-1], *drafts])
        said = _validated(speculation, model, fed, length)
        kept = []
        for tokens, says, r in zip(fed, said, rows, strict=True):
            right = [d == s for d, s in zip(tokens[1:], says, strict=False)]
            kept.append(1 + [*right, False].index(False))
            got[r] += says[: kept[-1]]
        tokens = mx.array(fed)
        speculation.commit(kept, lambda a, b, t=tokens: model(t[:, a:b], cache=speculation.layers))
        order = batch.leave({i for i, r in enumerate(rows) if len(got[r]) >= counts[r]})
        rows = [rows[i] for i in order]
        batch.check_integrity()
    assert [tokens[:n] for tokens, n in zip(got, counts, strict=True)] == expected


def _validated(
    speculation: Speculation, model: nn.Module, fed: list[list[int]], length: int
) -> list[list[int]]:
    with speculation.step(length):
        logits = model(mx.array(fed), cache=speculation.layers)
    return mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_next_logits_are_those_of_token_by_token(name: str) -> None:
    model, random_ = MODELS[name](2), random.Random(2)
    prompts = [[random_.randrange(3, 250) for _ in range(n)] for n in (3, 14, 40)]
    batch, solos = make_batch(model), [make_batch(model) for _ in prompts]
    for prompt, solo in zip(prompts, solos, strict=True):
        state = _prefilled(model, prompt)
        batch.join(state)
        solo.join(state)
    speculation = Speculation(batch)
    for kept in ([0, 2, 6], [6, 6, 6], [4, 0, 0], [1, 3, 5]):
        tokens = np.array([[random_.randrange(3, 250) for _ in range(6)] for _ in prompts])
        fed = mx.array(tokens)
        with speculation.step(6):
            model(fed, cache=batch.layers)
        speculation.commit(kept, lambda a, b, t=fed: model(t[:, a:b], cache=batch.layers))
        for solo, row, n in zip(solos, tokens.tolist(), kept, strict=True):
            for token in row[:n]:
                _decoded(model, solo, [token])
        following = [random_.randrange(3, 250) for _ in prompts]
        logits = _decoded(model, batch, following)
        for r, (solo, token) in enumerate(zip(solos, following, strict=True)):
            assert mx.allclose(logits[r], _decoded(model, solo, [token])[0], 1e-5, 1e-5)


def _decoded(model: nn.Module, batch: BatchCache, tokens: list[int]) -> mx.array:
    with batch.step(1):
        logits = model(mx.array(tokens)[:, None], cache=batch.layers)[:, -1]
    mx.eval(logits, batch.state)
    return logits


def _numbered(rows: Sequence[Sequence[int]], kinds: Sequence[LayerKind]) -> BatchCache:
    """A batch whose rows have taken their tokens one by one."""
    batch = BatchCache(kinds)
    for row in rows:
        solo = BatchCache(kinds)
        solo.join()
        for token in row:
            with solo.step(1):
                _feed(solo, np.array([[token]]))
        batch.join(solo.extract(0))
    return batch


MIXED = (LayerKind(), LayerKind(8), LayerKind(recurrent=True), LayerKind(3))
ROWS = (list(range(1, 6)), list(range(10, 18)), list(range(20, 60)))
DRAFTS = np.arange(100, 115).reshape(3, 5)


def _open(kinds: Sequence[LayerKind] = MIXED) -> Speculation:
    speculation = Speculation(_numbered(ROWS, kinds))
    with speculation.step(5):
        _feed(speculation.batch, DRAFTS)
    return speculation


def test_discard_leaves_the_state_as_it_was() -> None:
    """Rows before, at and past their window's wrap."""
    speculation = _open()
    speculation.discard()
    assert speculation.written == 0
    _assert_holds(speculation.batch, ROWS)


def _failing_step(speculation: Speculation) -> None:
    with speculation.step(4):
        _feed(speculation.batch, np.full((3, 4), 999))
        raise ZeroDivisionError


def test_a_step_that_fails_never_was() -> None:
    speculation = _open()
    with pytest.raises(ZeroDivisionError):
        _failing_step(speculation)
    speculation.commit([5, 0, 5])
    _assert_holds(speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2]]])
    with pytest.raises(ZeroDivisionError):
        _failing_step(speculation)
    assert speculation.written == 0
    _assert_holds(speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2]]])


@pytest.mark.parametrize(
    ("accepted", "said"),
    [
        ([0, 6, 0], "row 1 wrote 5 tokens and cannot keep 6"),
        ([0, -1, 0], "cannot keep -1"),
        ([1, 1], "2 numbers for 3 rows"),
    ],
)
def test_wrong_numbers_are_refused_and_lose_nothing(accepted: list[int], said: str) -> None:
    speculation = _open()
    with pytest.raises(SpeculationError, match=said):
        speculation.commit(accepted)
    speculation.commit([5, 5, 5])
    taken = [[*row, *new] for row, new in zip(ROWS, DRAFTS, strict=True)]
    _assert_holds(speculation.batch, taken)
    with pytest.raises(SpeculationError, match="nothing was written"):
        speculation.commit([0, 0, 0])
    with pytest.raises(SpeculationError, match="nothing was written"):
        speculation.discard()
    _assert_holds(speculation.batch, taken)


def test_states_go_back_to_steps_and_further_only_by_replay() -> None:
    speculation = _open()
    with speculation.step(2):
        _feed(speculation.batch, np.full((3, 2), 7))
    with pytest.raises(NeedsReplay, match=r"rows \[1, 2\] were kept only after \[0, 5, 7\]") as no:
        speculation.commit([5, 2, 1])
    assert no.value.rows == [1, 2]
    speculation.commit([5, 0, 7])
    _assert_holds(
        speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2], 7, 7]]
    )


def test_a_replay_that_fails_discards() -> None:
    speculation = _open()
    replayed: list[tuple[int, int]] = []

    def replay(start: int, stop: int) -> None:
        replayed.append((start, stop))
        _feed(speculation.batch, DRAFTS[:, start:stop])
        if stop == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        speculation.commit([2, 4, 5], replay)
    assert replayed == [(0, 2), (2, 4)]
    assert speculation.written == 0
    _assert_holds(speculation.batch, ROWS)


def test_what_cannot_speculate_is_refused_at_the_start() -> None:
    class Sinks:
        pass

    batch = BatchCache([LayerKind()])
    batch._parts = [Sinks()]
    with pytest.raises(SpeculationError, match="Sinks cannot take tokens back"):
        Speculation(batch)
    ended = _numbered(ROWS, [LayerKind()])
    with ended.step(2, [2, 1, 2]):
        _feed(ended, np.zeros((3, 2)))
    with pytest.raises(SpeculationError, match="has to leave"):
        Speculation(ended)
    states = Speculation(_numbered(ROWS, MIXED))
    with pytest.raises(SpeculationError, match="padding"), states.step(2, [2, 1, 2]):
        pass
    with pytest.raises(SpeculationError, match="cannot take"), states.step(0):
        pass


def test_a_batch_that_has_gone_on_ends_the_transaction() -> None:
    speculation = _open()
    speculation.batch.leave({1})
    for call in (speculation.discard, lambda: speculation.commit([0, 0])):
        with pytest.raises(SpeculationError, match="gone on"):
            call()


def test_isolated_never_touches_the_batch() -> None:
    live = _numbered(ROWS, MIXED)
    before = [np.array(array) for array in live.state]
    speculation = Speculation(live, isolated=True)
    with speculation.step(5):
        _feed(speculation.batch, DRAFTS)
    speculation.commit([5, 0, 5])
    _assert_holds(speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2]]])
    assert live.offsets == [len(row) for row in ROWS]
    for old, new in zip(before, live.state, strict=True):
        assert np.array_equal(old, np.array(new))


def test_a_commit_copies_only_rows_that_kept_another_number() -> None:
    """Columns moved: none if all kept as many; else the shorter rows, of a window its width."""
    speculation = _open((LayerKind(), LayerKind(8)))
    full, window = (part.ring for part in speculation.batch.parts)
    moves = [ring.settle(5, [1, 1, 4]) for ring in (full, window)]
    assert [[(m.row, m.tokens) for m in ring] for ring in moves] == [
        [(0, 6), (1, 9)],
        [(2, 8)],
    ]
    assert full.lengths == [6, 9, 44]
    assert [ring.settle(0, [0, 0, 0]) for ring in (full, window)] == [[], []]


def test_a_commit_writes_in_place() -> None:
    batch = BatchCache([LayerKind()] * 4)
    for _ in range(8):
        batch.join(columns=8_000)
    speculation = Speculation(batch)
    tokens = np.arange(32).reshape(8, 4)
    with speculation.step(4):
        _feed(batch, tokens)
    mx.eval(batch.state)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for shift in range(3):
        speculation.commit([(shift + r) % 5 for r in range(8)])
        with speculation.step(4):
            read = _feed(batch, tokens)
        mx.eval([array.sum() for pair in read for array in pair])
        del read
    mx.eval(batch.state)
    assert mx.get_peak_memory() - base < batch.nbytes / 8


@pytest.mark.parametrize("past", [0, 3, 9])
def test_logical_view_reads_the_newest_in_order(past: int) -> None:
    batch = _numbered(ROWS, MIXED)
    rows = [list(row) for row in ROWS]
    for i in range(past):
        with batch.step(1):
            _feed(batch, np.full((3, 1), 200 + i))
        rows = [[*row, 200 + i] for row in rows]

    def assert_is(piece: KVPiece, wanted: Sequence[Sequence[int]]) -> None:
        for array, expected in zip(piece.arrays, _kv(np.array(wanted)), strict=True):
            assert np.array_equal(np.array(array), np.array(expected))

    for layer, most in ((0, 5), (1, 5), (3, 2)):
        for tokens in range(1, most + 1):
            newest = [row[-tokens:] for row in rows]
            assert_is(logical_view(batch, layer, None, tokens), newest)
            for r in range(3):
                assert_is(logical_view(batch, layer, r, tokens), [newest[r]])
    assert logical_view(batch, 0, 1, 0).tokens == 0
    for layer, tokens in ((0, len(rows[0]) + 1), (1, 8), (2, 1), (0, -1)):
        with pytest.raises(SpeculationError):
            logical_view(batch, layer, None, tokens)
    _assert_holds(batch, rows)


def test_a_state_first_written_within_a_transaction() -> None:
    batch = BatchCache([LayerKind(recurrent=True)])
    batch.join()
    batch.join()
    speculation = Speculation(batch)
    for kept in ([0, 0], [0, 3]):
        with speculation.step(3):
            _feed(batch, np.array([[1, 2, 3], [4, 5, 6]]))
        speculation.commit(kept)
    _assert_holds(batch, [[], [4, 5, 6]])
    assert isinstance(batch.parts[0], StateLayer)
    assert isinstance(batch.extract(0).layers[0], StatePiece)
