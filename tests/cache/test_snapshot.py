"""Snapshots: ranges, splits, merges, where a sequence can resume, and the memory they keep."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from chairlift.cache.snapshot import (
    KVPiece,
    LayerKind,
    LayerState,
    Snapshot,
    StatePiece,
    merged,
    resumable,
)

FULL, WINDOW, STATE = LayerKind(), LayerKind(window=4), LayerKind(recurrent=True)
KINDS = [FULL, WINDOW, STATE]
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5

# Bound on what the allocator adds to a test's buffers: pages of 16 KiB on macOS.
SLACK = 100_000


def _kv(layer: int, start: int, stop: int) -> KVPiece:
    """Keys that hold their layer and position; the values are the negative keys."""
    numbers = 1000.0 * layer + mx.arange(start, stop)[None, None, :, None]
    heads = 0.25 * mx.arange(HEADS)[None, :, None, None]
    shape = (1, HEADS, stop - start)
    return KVPiece(
        mx.broadcast_to(numbers + heads, (*shape, KEY_DIM)),
        mx.broadcast_to(-numbers - heads, (*shape, VALUE_DIM)),
    )


def _state(position: int) -> StatePiece:
    return StatePiece((mx.full((1, 2), position), None, mx.full((1, 3), -position)))


def _snapshot(start: int, stop: int, window: int | None = None, state: bool = True) -> Snapshot:
    """Layers of ``KINDS`` for [start, stop); the window layer holds the last ``window`` tokens."""
    oldest = start if window is None else stop - window
    layers: list[LayerState | None] = [
        _kv(0, start, stop),
        _kv(1, oldest, stop) if window != 0 else None,
    ]
    return Snapshot(start, stop, (*layers, _state(stop) if state else None))


def _positions(snapshot: Snapshot, layer: int) -> list[int]:
    """The positions that a layer's keys hold; heads, dims and values must agree."""
    piece = snapshot.layers[layer]
    if piece is None:
        return []
    assert isinstance(piece, KVPiece)
    keys, values = np.array(piece.keys), np.array(piece.values)
    first = keys[0, 0, :, 0] - 1000 * layer
    expected = _kv(layer, int(first[0]), int(first[0]) + len(first))
    assert np.array_equal(keys, np.array(expected.keys))
    assert np.array_equal(values, np.array(expected.values))
    return [int(position) for position in first]


def _state_of(snapshot: Snapshot) -> int | None:
    piece = snapshot.layers[2]
    if piece is None:
        return None
    assert isinstance(piece, StatePiece)
    first, nothing, last = piece.slots
    assert nothing is None
    assert first is not None
    assert last is not None
    assert last.tolist() == [[-first[0, 0].item()] * 3]
    return int(first[0, 0].item())


def _spread(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4)])
def test_an_invalid_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="cannot cover"):
        Snapshot(start, stop, (None,))


def test_more_tokens_than_covered_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens held"):
        Snapshot(4, 6, (_kv(0, 3, 6),))


@pytest.mark.parametrize(
    ("keys", "values"), [((2, 3, 4), (1, 2, 3, 4)), ((1, 2, 3, 4), (1, 2, 4, 4))]
)
def test_malformed_keys_and_values_are_refused(
    keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 3, 4\).*are not"):
        KVPiece(mx.zeros(keys), mx.zeros(values))


def test_a_split_gives_the_state_to_the_later_part() -> None:
    before, after = _snapshot(3, 9).split(5)
    assert (before.start, before.stop, after.start, after.stop) == (3, 5, 5, 9)
    assert [_positions(before, layer) for layer in (0, 1)] == [_spread(3, 5)] * 2
    assert [_positions(after, layer) for layer in (0, 1)] == [_spread(5, 9)] * 2
    assert (_state_of(before), _state_of(after)) == (None, 9)


@pytest.mark.parametrize(("at", "before", "after"), [(9, 3, 1), (6, 0, 4), (8, 2, 2), (7, 1, 3)])
def test_a_split_divides_a_window_between_its_parts(at: int, before: int, after: int) -> None:
    one, two = _snapshot(0, 10, window=4).split(at)
    assert _positions(one, 1) == _spread(at - before, at)
    assert _positions(two, 1) == _spread(10 - after, 10)


def test_a_split_at_an_end_gives_an_empty_part_and_the_snapshot_itself() -> None:
    snapshot = _snapshot(3, 9)
    empty, same = snapshot.split(3)
    assert same is snapshot
    assert (empty.start, empty.stop, empty.nbytes, empty.arrays) == (3, 3, 0, [])
    same, empty = snapshot.split(9)
    assert same is snapshot
    assert (empty.start, empty.stop, empty.nbytes) == (9, 9, 0)
    for at in (2, 10):
        with pytest.raises(ValueError, match="cannot split"):
            snapshot.split(at)


def test_the_parts_of_a_split_take_the_bytes_of_the_snapshot() -> None:
    for window in (None, 0, 4):
        snapshot = _snapshot(2, 12, window)
        for at in range(2, 13):
            one, two = snapshot.split(at)
            assert one.nbytes + two.nbytes == snapshot.nbytes
            assert sum(array.nbytes for array in one.arrays + two.arrays) == snapshot.nbytes


def test_a_part_shares_memory_and_has_the_state_only_at_the_end() -> None:
    snapshot = _snapshot(2, 12, window=5)
    assert snapshot.part(2, 12) is snapshot
    part = snapshot.part(4, 9)
    assert (part.start, part.stop) == (4, 9)
    assert (_positions(part, 0), _positions(part, 1)) == (_spread(4, 9), [7, 8])
    assert _state_of(part) is None
    end = snapshot.part(12, 12)
    assert (end.layers[:2], _state_of(end)) == ((None, None), 12)
    for start, stop in ((1, 5), (5, 13), (6, 5)):
        with pytest.raises(ValueError, match="is not within"):
            snapshot.part(start, stop)


def test_filled_adds_only_longer_windows_and_missing_states() -> None:
    partial = _snapshot(2, 12, window=3, state=False)
    other = _snapshot(5, 12, window=6)
    filled = partial.filled(other)
    assert (_positions(filled, 0), _positions(filled, 1)) == (_spread(2, 12), _spread(6, 12))
    assert _state_of(filled) == 12
    assert filled.layers[0] is partial.layers[0]
    assert filled.filled(partial) is filled
    for start, stop in ((1, 12), (2, 11)):
        with pytest.raises(ValueError, match="is no end of"):
            partial.filled(_snapshot(start, stop))


@pytest.mark.parametrize(
    ("kind", "position", "needed"),
    [
        (FULL, 9, 9),
        (WINDOW, 2, 2),
        (WINDOW, 3, 3),
        (WINDOW, 9, 3),
        (LayerKind(window=1), 9, 0),
        (STATE, 9, 0),
    ],
)
def test_tokens_that_a_kind_needs_to_resume(kind: LayerKind, position: int, needed: int) -> None:
    assert kind.needed(position) == needed


def test_resumable_only_if_every_kind_has_what_it_needs() -> None:
    nothing = Snapshot(0, 0, (None,) * 3)
    assert resumable(KINDS, [])
    assert resumable(KINDS, [nothing])
    assert resumable(KINDS, [_snapshot(0, 10, window=3)])
    assert not resumable(KINDS, [_snapshot(0, 10, window=2)]), "3 old tokens are needed"
    assert not resumable(KINDS, [_snapshot(0, 10, state=False)])
    assert not resumable(KINDS, [_snapshot(2, 10)]), "full attention needs the first two as well"
    assert resumable([WINDOW], [Snapshot(7, 10, (_kv(1, 7, 10),))])
    before, after = _snapshot(0, 10).split(6)
    assert not resumable(KINDS, [before]), "only the end has a state"
    assert resumable(KINDS, [before, after])
    assert resumable(KINDS[:2], [before])


def test_a_gap_ends_a_window() -> None:
    path = [_snapshot(0, 6), _snapshot(6, 10, window=2), _snapshot(10, 10, window=0)]
    assert not resumable(KINDS, path), "7 is missing: tokens before the gap do not count"
    assert _positions(merged(KINDS, path), 1) == [8, 9]
    path[1] = _snapshot(6, 10, window=3)
    assert resumable(KINDS, path)
    assert _positions(merged(KINDS, path), 1) == [7, 8, 9]


def test_a_window_may_reach_into_the_snapshot_before() -> None:
    path = [_snapshot(0, 6, window=1), _snapshot(6, 8)]
    assert resumable(KINDS, path)
    assert _positions(merged(KINDS, path), 1) == [5, 6, 7]


def test_empty_snapshots_change_nothing() -> None:
    """Empty snapshots before, between and at the end; one of them may hold the state."""

    def empty(at: int, state: bool = False) -> Snapshot:
        return Snapshot(at, at, (None, None, _state(at) if state else None))

    path = [empty(0), _snapshot(0, 6), empty(6), _snapshot(6, 8), empty(8), empty(8)]
    assert resumable(KINDS, path)
    one = merged(KINDS, path)
    assert (one.start, one.stop, _state_of(one)) == (0, 8, 8)
    assert (_positions(one, 0), _positions(one, 1)) == (_spread(0, 8), _spread(5, 8))
    path = [_snapshot(0, 6), _snapshot(6, 8, state=False), empty(8)]
    assert not resumable(KINDS, path), "the state at 6 does not serve for 8"
    assert _state_of(merged(KINDS, path)) is None
    path[-1] = empty(8, state=True)
    assert resumable(KINDS, path)
    assert _state_of(merged(KINDS, path)) == 8


def test_merging_the_parts_of_a_split_restores_the_snapshot() -> None:
    snapshot = _snapshot(0, 10)
    for at in range(11):
        one = merged(KINDS, snapshot.split(at))
        assert (one.start, one.stop, _state_of(one)) == (0, 10, 10)
        assert (_positions(one, 0), _positions(one, 1)) == (_spread(0, 10), [7, 8, 9])
    nothing = merged(KINDS, [])
    assert (nothing.start, nothing.stop, nothing.layers) == (0, 0, (None,) * 3)


def test_a_broken_path_is_refused() -> None:
    path = [_snapshot(0, 4), _snapshot(5, 9)]
    for ask in (merged, resumable):
        with pytest.raises(ValueError, match="is not followed by"):
            ask(KINDS, path)


def test_copies_keep_every_bit_and_type() -> None:
    """NaN payloads, denormals, negative zero and booleans: a state may have any type."""
    bits = mx.array([0x7F81, 0xFFC1, 0x0001, 0x8000, 0x3F80], mx.uint16)
    odd = mx.broadcast_to(bits.view(mx.bfloat16)[None, None, :, None], (1, 2, 5, 3))
    kv = KVPiece(odd, odd).part(1, 5).copy()
    assert kv.keys.dtype == mx.bfloat16
    assert np.array_equal(np.array(mx.contiguous(kv.keys).view(mx.uint16))[0, 1, :, 2], bits[1:])
    flags = mx.array([[True, False]])
    state = StatePiece((flags, None, bits[None])).copy()
    assert [None if slot is None else slot.dtype for slot in state.slots] == [
        mx.bool_,
        None,
        mx.uint16,
    ]
    assert state.nbytes == flags.nbytes + bits.nbytes


@pytest.mark.parametrize("heads", [1, 4])
def test_a_copy_does_not_keep_its_source_alive(heads: int) -> None:
    """With one head the slice is contiguous, with four it is not."""
    big = mx.random.normal((1, heads, 50_000, 8))
    flat = mx.random.normal((1, 1_000_000))
    mx.eval(big, flat)
    before = mx.get_active_memory()
    source = Snapshot(0, 100, (KVPiece(big, big).part(70, 170), StatePiece((flat[:, 5:10],))))
    copy = source.copy()
    expected = np.array(big[:, :, 70:170]), np.array(flat[:, 5:10])
    mx.eval(copy.arrays)
    freed = big.nbytes + flat.nbytes
    del big, flat, source
    assert abs(mx.get_active_memory() - (before - freed + copy.nbytes)) < SLACK
    piece, state = copy.layers
    assert isinstance(piece, KVPiece)
    assert isinstance(state, StatePiece)
    assert np.array_equal(np.array(piece.keys), expected[0])
    assert np.array_equal(np.array(state.slots[0]), expected[1])


def test_filled_does_not_keep_its_source_alive() -> None:
    kv = KVPiece(mx.zeros((1, 2, 50_000, 4)), mx.zeros((1, 2, 50_000, 4)))
    mx.eval(kv.arrays)
    base = mx.get_active_memory() - kv.nbytes
    filled = Snapshot(0, 20, (None,)).filled(Snapshot(0, 20, (kv.part(10, 20),)))
    mx.eval(filled.arrays)
    del kv
    assert filled.nbytes == 10 * 2 * 8 * 4
    assert abs(mx.get_active_memory() - base - filled.nbytes) < SLACK


def test_the_parts_of_a_split_do_not_keep_the_snapshot_alive() -> None:
    kv = KVPiece(mx.zeros((1, 2, 50_000, 4)), mx.zeros((1, 2, 50_000, 4)))
    snapshot = Snapshot(0, 50_000, (kv,))
    mx.eval(snapshot.arrays)
    base = mx.get_active_memory() - snapshot.nbytes
    before, after = snapshot.split(20_000)
    mx.eval(before.arrays, after.arrays)
    del snapshot, kv
    assert abs(mx.get_active_memory() - base - before.nbytes - after.nbytes) < SLACK
    del after
    assert abs(mx.get_active_memory() - base - before.nbytes) < SLACK
