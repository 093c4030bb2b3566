"""Speculation: after a commit a row holds what it would hold had it taken its tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from support.cache.speculation import assert_rows_hold, feed

from chairlift.cache.batch import BatchCache
from chairlift.cache.snapshot import LayerKind, StatePiece
from chairlift.cache.speculation import NeedsReplay, Speculation, SpeculationError
from chairlift.cache.state import StateLayer


def batch_of(rows: Sequence[Sequence[int]], kinds: Sequence[LayerKind]) -> BatchCache:
    """A batch whose rows took their tokens one by one."""
    batch = BatchCache(kinds)
    for row in rows:
        solo = BatchCache(kinds)
        solo.join()
        for token in row:
            with solo.step(1):
                feed(solo, np.array([[token]]))
        batch.join(solo.extract(0))
    return batch


MIXED = (LayerKind(), LayerKind(8), LayerKind(recurrent=True), LayerKind(3))
ROWS = (list(range(1, 6)), list(range(10, 18)), list(range(20, 60)))
DRAFTS = np.arange(100, 115).reshape(3, 5)


def open_speculation(kinds: Sequence[LayerKind] = MIXED) -> Speculation:
    speculation = Speculation(batch_of(ROWS, kinds))
    with speculation.step(5):
        feed(speculation.batch, DRAFTS)
    return speculation


def test_discard_leaves_the_state_as_it_was() -> None:
    """For rows shorter than, as long as and longer than their window."""
    speculation = open_speculation()
    speculation.discard()
    assert speculation.written == 0
    assert_rows_hold(speculation.batch, ROWS)


def failing_step(speculation: Speculation) -> None:
    with speculation.step(4):
        feed(speculation.batch, np.full((3, 4), 999))
        raise ZeroDivisionError


def test_a_step_that_fails_changes_nothing() -> None:
    speculation = open_speculation()
    with pytest.raises(ZeroDivisionError):
        failing_step(speculation)
    speculation.commit([5, 0, 5])
    assert_rows_hold(speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2]]])
    with pytest.raises(ZeroDivisionError):
        failing_step(speculation)
    assert speculation.written == 0
    assert_rows_hold(speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2]]])


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ([0, 6, 0], "row 1 wrote 5 tokens and cannot keep 6"),
        ([0, -1, 0], "cannot keep -1"),
        ([1, 1], "2 numbers for 3 rows"),
    ],
)
def test_wrong_counts_are_refused_and_lose_nothing(accepted: list[int], message: str) -> None:
    speculation = open_speculation()
    with pytest.raises(SpeculationError, match=message):
        speculation.commit(accepted)
    speculation.commit([5, 5, 5])
    all_tokens = [[*row, *new] for row, new in zip(ROWS, DRAFTS, strict=True)]
    assert_rows_hold(speculation.batch, all_tokens)
    with pytest.raises(SpeculationError, match="nothing was written"):
        speculation.commit([0, 0, 0])
    with pytest.raises(SpeculationError, match="nothing was written"):
        speculation.discard()
    assert_rows_hold(speculation.batch, all_tokens)


def test_states_rewind_to_step_ends_and_elsewhere_only_by_replay() -> None:
    speculation = open_speculation()
    with speculation.step(2):
        feed(speculation.batch, np.full((3, 2), 7))
    with pytest.raises(NeedsReplay, match=r"rows \[1, 2\] were kept only after \[0, 5, 7\]") as no:
        speculation.commit([5, 2, 1])
    assert no.value.rows == [1, 2]
    speculation.commit([5, 0, 7])
    assert_rows_hold(
        speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2], 7, 7]]
    )


def test_a_replay_that_fails_discards() -> None:
    speculation = open_speculation()
    replayed: list[tuple[int, int]] = []

    def replay(start: int, stop: int) -> None:
        replayed.append((start, stop))
        feed(speculation.batch, DRAFTS[:, start:stop])
        if stop == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        speculation.commit([2, 4, 5], replay)
    assert replayed == [(0, 2), (2, 4)]
    assert speculation.written == 0
    assert_rows_hold(speculation.batch, ROWS)


def test_a_batch_that_cannot_speculate_is_refused() -> None:
    class Sinks:
        pass

    batch = BatchCache([LayerKind()])
    batch._parts = [Sinks()]
    with pytest.raises(SpeculationError, match="Sinks cannot take tokens back"):
        Speculation(batch)
    ended = batch_of(ROWS, [LayerKind()])
    with ended.step(2, [2, 1, 2]):
        feed(ended, np.zeros((3, 2)))
    with pytest.raises(SpeculationError, match="has to leave"):
        Speculation(ended)
    states = Speculation(batch_of(ROWS, MIXED))
    with pytest.raises(SpeculationError, match="padding"), states.step(2, [2, 1, 2]):
        pass
    with pytest.raises(SpeculationError, match="cannot take"), states.step(0):
        pass


def test_a_change_of_the_batch_ends_the_transaction() -> None:
    speculation = open_speculation()
    speculation.batch.leave({1})
    for call in (speculation.discard, lambda: speculation.commit([0, 0])):
        with pytest.raises(SpeculationError, match="gone on"):
            call()


def test_an_isolated_speculation_never_changes_the_batch() -> None:
    live = batch_of(ROWS, MIXED)
    before = [np.array(array) for array in live.state]
    speculation = Speculation(live, isolated=True)
    with speculation.step(5):
        feed(speculation.batch, DRAFTS)
    speculation.commit([5, 0, 5])
    assert_rows_hold(speculation.batch, [[*ROWS[0], *DRAFTS[0]], ROWS[1], [*ROWS[2], *DRAFTS[2]]])
    assert live.offsets == [len(row) for row in ROWS]
    for old, new in zip(before, live.state, strict=True):
        assert np.array_equal(old, np.array(new))


def test_a_commit_copies_nothing() -> None:
    """Each row's cursor moves back over what it rejects; the buffers stay as they are."""
    speculation = open_speculation((LayerKind(), LayerKind(8)))
    batch = speculation.batch
    full, window = (part.ring for part in batch.parts)
    cursors = [list(ring.cursors) for ring in (full, window)]
    lengths = [list(ring.lengths) for ring in (full, window)]
    buffers = batch.state
    mx.eval(buffers)
    kept = [1, 1, 4]
    batch.take_back(5, kept)
    assert all(new is old for new, old in zip(batch.state, buffers, strict=True))
    for ring, old_cursors, old_lengths in zip((full, window), cursors, lengths, strict=True):
        moved = [(c - 5 + keep) % ring.columns for c, keep in zip(old_cursors, kept, strict=True)]
        assert ring.cursors == moved
        assert ring.lengths == [n - 5 + keep for n, keep in zip(old_lengths, kept, strict=True)]
    assert full.lengths == [6, 9, 44]


def test_a_commit_writes_in_place() -> None:
    batch = BatchCache([LayerKind()] * 4)
    for _ in range(8):
        batch.join(columns=8_000)
    speculation = Speculation(batch)
    tokens = np.arange(32).reshape(8, 4)
    with speculation.step(4):
        feed(batch, tokens)
    mx.eval(batch.state)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for shift in range(3):
        speculation.commit([(shift + r) % 5 for r in range(8)])
        with speculation.step(4):
            read = feed(batch, tokens)
        mx.eval([array.sum() for pair in read for array in pair])
        del read
    mx.eval(batch.state)
    assert mx.get_peak_memory() - base < batch.nbytes / 8


def test_a_state_first_written_within_a_transaction() -> None:
    batch = BatchCache([LayerKind(recurrent=True)])
    batch.join()
    batch.join()
    speculation = Speculation(batch)
    for kept in ([0, 0], [0, 3]):
        with speculation.step(3):
            feed(batch, np.array([[1, 2, 3], [4, 5, 6]]))
        speculation.commit(kept)
    assert_rows_hold(batch, [[], [4, 5, 6]])
    assert isinstance(batch.parts[0], StateLayer)
    assert isinstance(batch.extract(0).layers[0], StatePiece)
