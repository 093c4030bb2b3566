"""Swapped states of preempted rows: kept bit for bit in memory and on disk, within both budgets."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece
from chairlift.cache.swap import files as swap_files
from chairlift.cache.swap.files import SwapFiles
from chairlift.cache.swap.swap import TOKEN_BYTES, Swap

KINDS = (LayerKind(), LayerKind(4), LayerKind(recurrent=True, slots=2))
TOKENS = 8
# Bytes of one state: full layer, three tokens of the window of 4, recurrent state, token ids.
ONE = 4 * (2 * 3 * TOKENS + 2 * 3 * 3 + 5) + TOKEN_BYTES * TOKENS
PATIENCE = 180.0
Make = Callable[[int], Swap[int]]


def _state(number: int, dtype: mx.Dtype = mx.float32) -> Snapshot:
    key = mx.random.key(number)
    kv = mx.random.normal((4, 1, 1, TOKENS, 3), dtype, key=key)
    slot = mx.random.normal((1, 5), dtype, key=key)
    return Snapshot(
        0, TOKENS, (KVPiece(kv[0], kv[1]), KVPiece(kv[2], kv[3]), StatePiece((slot, None)))
    )


def _put(swap: Swap[int], number: int, dtype: mx.Dtype = mx.float32) -> bool:
    taken = swap.put(number, range(number, number + TOKENS + 1), _state(number, dtype))
    mx.eval(swap.pending)
    swap.move_to_host()
    assert swap.nbytes <= swap.budget
    return taken


def _assert_is(got: Snapshot, number: int, dtype: mx.Dtype = mx.float32) -> None:
    full, window, state = _state(number, dtype).layers
    assert isinstance(full, KVPiece)
    assert isinstance(window, KVPiece)
    assert isinstance(state, StatePiece)
    expected = [*full.arrays, *window.newest(3).arrays, *state.arrays]
    assert (got.start, got.stop, len(got.arrays)) == (0, TOKENS, len(expected))
    for ours, theirs in zip(got.arrays, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(np.array(ours.view(mx.uint8)), np.array(theirs.view(mx.uint8)))


@pytest.fixture
def files(tmp_path: Path) -> SwapFiles:
    return SwapFiles(tmp_path, 1 << 20)


@pytest.fixture
def make(files: SwapFiles, tmp_path: Path) -> Iterator[Make]:
    """Makes swaps with a memory budget and files on disk."""
    swaps: list[Swap[int]] = []

    def new(budget: int) -> Swap[int]:
        swaps.append(Swap(KINDS, budget, files))
        return swaps[-1]

    yield new
    assert not list(tmp_path.iterdir()), "files have no names"
    for swap in swaps:
        swap.close()
        assert (swap.nbytes, swap.disk_nbytes) == (0, 0)


def _until(swap: Swap[int], condition: Callable[[], object]) -> list[int]:
    """Works until the condition holds; returns the keys whose states went to disk."""
    deadline = time.monotonic() + PATIENCE
    filed = []
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        filed += swap.work()
        assert swap.nbytes <= swap.budget
        time.sleep(0.001)
    return filed


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("offloads", [False, True])
def test_take_returns_the_state_that_was_put(offloads: bool, dtype: mx.Dtype) -> None:
    swap: Swap[int] = Swap(KINDS, 1 << 20, offloads=offloads)
    assert _put(swap, 7, dtype)
    assert (swap.covers(7), swap.covers(8), swap.place(7), swap.place(8)) == (
        TOKENS,
        0,
        "memory",
        None,
    )
    _assert_is(swap.take(7), 7, dtype)
    assert (swap.covers(7), swap.nbytes) == (0, 0)


def test_a_state_without_room_is_refused() -> None:
    swap: Swap[int] = Swap(KINDS, 2 * ONE)
    assert [_put(swap, i) for i in range(3)] == [True, True, False]
    assert swap.nbytes == 2 * ONE
    swap.drop(0)
    swap.drop(5)
    assert swap.nbytes == ONE
    assert _put(swap, 2)
    assert not Swap(KINDS, 0).put(1, range(9), _state(1))


def test_the_last_in_line_go_to_disk_and_come_back_in_time(make: Make, files: SwapFiles) -> None:
    swap = make(4 * ONE)
    for i in (1, 2, 3, 4):
        assert _put(swap, i)
    assert _until(swap, lambda: swap.nbytes == 2 * ONE) == [4, 3]
    assert [swap.place(i) for i in (1, 2, 3, 4)] == ["memory", "memory", "disk", "disk"]
    assert 2 * ONE < swap.disk_nbytes < files.budget
    assert swap.fetching(3)
    for i in (1, 2):
        _assert_is(swap.take(i), i)
    _until(swap, lambda: not swap.fetching(3) and not swap.fetching(4))
    assert swap.disk_nbytes == 0
    for i in (3, 4):
        assert swap.place(i) == "disk", "it came from disk"
        _assert_is(swap.take(i), i)


def test_the_first_in_line_is_read_even_if_memory_is_more_than_half_full(make: Make) -> None:
    swap = make(2 * ONE)
    assert _put(swap, 1)
    assert _put(swap, 9)
    assert _until(swap, lambda: swap.nbytes == ONE) == [9]
    assert _put(swap, 12)
    swap.drop(1)
    _until(swap, lambda: not swap.fetching(9))
    _assert_is(swap.take(9), 9)


def test_no_state_takes_the_room_that_the_first_on_disk_needs(make: Make, files: SwapFiles) -> None:
    swap = make(2 * ONE)
    assert _put(swap, 1)
    assert _put(swap, 2)
    assert _until(swap, lambda: swap.nbytes == ONE) == [2]
    assert _put(swap, 3)
    assert swap.take(1)
    files.budget = swap.disk_nbytes  # no room on disk for the third state
    swap.move_to_host()
    big = Snapshot(0, 2 * TOKENS, (KVPiece(*mx.zeros((2, 1, 1, 2 * TOKENS, 3))), None, None))
    swap.work()
    assert not swap.put(4, range(99), big), "a fourth state would keep the second on disk"
    _until(swap, lambda: not swap.fetching(2))


def test_the_disk_budget_is_kept(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path, 1)
    swap: Swap[int] = Swap(KINDS, 4 * ONE, files)
    for i in range(4):
        assert _put(swap, i)
    assert swap.work() == []
    assert not swap.due
    # A file is a little larger than its state.
    files.budget = ONE
    swap.work()
    _until(swap, lambda: swap.due)
    assert swap.work() == []
    assert (swap.nbytes, swap.disk_nbytes) == (4 * ONE, 0)
    swap.close()


@pytest.mark.parametrize("how", ["take", "drop"])
def test_a_state_may_leave_while_it_is_written(
    how: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, write = threading.Event(), swap_files.write_node

    def slowly(*args: Any) -> int:
        assert opened.wait(PATIENCE)
        return write(*args)

    monkeypatch.setattr(swap_files, "write_node", slowly)
    swap = make(2 * ONE)
    assert _put(swap, 1)
    assert _put(swap, 2)
    swap.work()
    if how == "take":
        _assert_is(swap.take(2), 2)
    swap.drop(2)
    assert swap.nbytes == 2 * ONE, "it stays in memory until it is written"
    assert not _put(swap, 3)
    opened.set()
    assert _until(swap, lambda: swap.nbytes == ONE) == []
    assert swap.disk_nbytes == 0


def test_a_state_may_be_dropped_while_it_is_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, read = threading.Event(), swap_files.node_of

    def slowly(*args: Any) -> Any:
        assert opened.wait(PATIENCE)
        return read(*args)

    monkeypatch.setattr(swap_files, "node_of", slowly)
    swap = make(2 * ONE)
    assert _put(swap, 1)
    assert _put(swap, 2)
    _until(swap, lambda: swap.fetching(2))
    swap.drop(1)
    swap.work()
    swap.drop(2)
    assert (swap.nbytes, swap.disk_nbytes > 0) == (ONE, True)
    opened.set()
    _until(swap, lambda: swap.nbytes == swap.disk_nbytes == 0)


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_the_state_of_a_broken_file_is_computed_again(
    damage: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    swap = make(2 * ONE)
    assert _put(swap, 1)
    assert _put(swap, 2)
    _until(swap, lambda: swap.fetching(2))
    file: Any = swap._states[2].form
    size = os.fstat(file.file.fileno()).st_size
    if damage == "cut":
        file.file.truncate(size - 1)
    else:
        os.pwrite(file.file.fileno(), b"\x55\xaa", size - 9)
    swap.drop(1)
    _until(swap, lambda: swap.covers(2) == 0)
    assert (swap.nbytes, swap.disk_nbytes) == (0, 0)
    assert "is computed again" in caplog.text


def test_a_full_disk_leaves_states_in_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(swap_files, "write_node", full)
    swap = make(2 * ONE)
    assert _put(swap, 1)
    assert _put(swap, 2)
    swap.work()
    _until(swap, lambda: swap.due)
    assert swap.work() == []
    assert not swap.due, "it is not tried again"
    assert "No space left on device" in caplog.text
    for i in (1, 2):
        _assert_is(swap.take(i), i)


def test_closing_leaves_nothing(tmp_path: Path) -> None:
    swap: Swap[int] = Swap(KINDS, 4 * ONE, SwapFiles(tmp_path / "new", 1 << 20))
    for i in range(4):
        assert _put(swap, i)
    _until(swap, lambda: swap.disk_nbytes)
    swap.close()
    assert (swap.nbytes, swap.disk_nbytes) == (0, 0)
    assert not list((tmp_path / "new").iterdir())


def test_an_unusable_directory_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SwapFiles(tmp_path / "file", 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_puts_takes_and_drops(seed: int, tmp_path: Path) -> None:
    files = SwapFiles(tmp_path, 5 * ONE)
    swap: Swap[int] = Swap(KINDS, 4 * ONE, files, offloads=True)
    random_ = random.Random(seed)
    stored: set[int] = set()
    from_disk = 0
    for number in range(600):
        if random_.random() < 0.5 and _put(swap, number):
            stored.add(number)
        if stored and random_.random() < 0.05:
            left = random_.choice(sorted(stored))
            swap.drop(left)
            stored.remove(left)
        ready = [i for i in sorted(stored) if not swap.fetching(i)]
        if ready and random_.random() < 0.2:
            from_disk += swap.place(ready[0]) == "disk"
            _assert_is(swap.take(ready[0]), ready[0])
            stored.remove(ready[0])
        swap.work()
        assert swap.nbytes <= 4 * ONE
        assert swap.disk_nbytes <= 5 * ONE
        assert all(swap.covers(i) == TOKENS for i in stored)
        time.sleep(random_.random() * 0.002)
    assert from_disk > 5
    swap.close()
