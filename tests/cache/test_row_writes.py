"""Rows that write at their own columns: by slices, by a scatter, and by NumPy."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache.rows import FULL, filled, written
from support.engine.kv import tokens_to_kv

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.layer import _resized
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot
from chairlift.cache.speculation import Speculation


def new_tokens(batch: BatchCache, step: int) -> np.ndarray:
    return np.array([[1000 * r + n + i for i in range(step)] for r, n in enumerate(batch.offsets)])


def assert_rows_hold_their_tokens(batch: BatchCache) -> None:
    for row, offset in enumerate(batch.offsets):
        snapshot = batch.extract(row)
        for piece in snapshot.layers:
            assert isinstance(piece, KVPiece)
            positions = np.arange(offset - piece.tokens, offset)
            expected = tokens_to_kv(1000 * row + positions[None])
            for found, wanted in zip(piece.arrays, expected, strict=True):
                assert np.array_equal(np.array(found), np.array(wanted))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.integers(2, 20),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_each_row_goes_on_behind_its_own_tokens(
    lengths: list[int], window: int, steps: list[int]
) -> None:
    batch = filled([FULL, LayerKind(window)], lengths)
    full = batch.attention[0].ring
    for step in steps:
        new = new_tokens(batch, step)
        with batch.step(step):
            for layer in batch.layers:
                layer.update_and_fetch(*tokens_to_kv(new))
            # With full attention nothing but the rows' own columns is read.
            assert tuple(full.visible(step)) == (0, max(batch.offsets) + step)
        batch.check_integrity()
        assert_rows_hold_their_tokens(batch)


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    window=st.integers(2, 12),
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), min_size=1, max_size=6),
    step=st.integers(1, 4),
)
def test_buffers_of_every_size_keep_the_rows(
    lengths: list[int], window: int, sizes: list[tuple[int, int]], step: int
) -> None:
    """Also those of wrapped windows; a row more or less copies no window row by row."""
    batch = filled([FULL, LayerKind(window)], lengths)
    for rows, columns in sizes:
        batch.resize(Capacity(len(batch) + rows, batch.tokens + columns), step)
        batch.check_integrity()
        assert_rows_hold_their_tokens(batch)
        new = new_tokens(batch, step)
        with batch.step(step):
            for layer in batch.layers:
                layer.update_and_fetch(*tokens_to_kv(new))
        assert_rows_hold_their_tokens(batch)
    ring = batch.attention[1].ring
    assert ring.kept(ring.columns) == [[(0, ring.columns)]] * len(batch)


def test_layers_without_values_are_written() -> None:
    """Some models cache keys only: values of no dimension."""
    batch = filled([FULL], [3, 5])
    batch.attention[0].reset()
    for _ in range(2):
        with batch.step(1):
            keys, values = batch.layers[0].update_and_fetch(
                mx.ones((2, 1, 1, 4)), mx.zeros((2, 1, 1, 0))
            )
            mx.eval(keys, values)
    assert keys[0, 0, 3:5].sum().item() == keys[1, 0, 5:7].sum().item() == 8
    assert values.shape == (2, 1, 7, 0)


def test_nothing_is_assigned_to_values_of_no_dimension(tmp_path: Path) -> None:
    """On CUDA, MLX 0.32.4 ends the process once such an array is used."""

    def is_assigned(array: mx.array) -> bool:
        mx.export_to_dot(str(tmp_path / "graph"), array)
        return "SliceUpdate" in (tmp_path / "graph").read_text()

    single = BatchCache([FULL])
    single.join()
    with single.step(3):
        single.layers[0].update_and_fetch(mx.ones((1, 1, 3, 4)), mx.zeros((1, 1, 3, 0)))
    keys, values = single.attention[0].state
    assert is_assigned(keys)
    assert not is_assigned(values)
    batch = BatchCache([FULL])
    for _ in range(2):
        batch.join(single.extract(0))
        keys, values = batch.attention[0].state
        assert is_assigned(keys)
        assert not is_assigned(values)
    batch.attention[0].clear_stale(0)
    assert not is_assigned(batch.attention[0].state[1])
    kept = batch.attention[0].ring.kept(64)
    for capacity in (Capacity(2, 64), Capacity(5, 64)):
        assert not is_assigned(_resized(values, capacity, kept))
        assert _resized(values, capacity, kept).shape == (capacity.rows, 1, 64, 0)


def host_step(batch: BatchCache) -> tuple[mx.array, mx.array]:
    keys, values = (np.array(array)[:, :, 0] for array in tokens_to_kv(new_tokens(batch, 1)))
    with batch.step(1):
        assert written(batch.attention[0], keys, values, [1] * len(batch))
        return batch.attention[0].keys_and_values()


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    steps=st.integers(1, 30),
)
def test_numpy_writes_what_mlx_writes(lengths: list[int], steps: int) -> None:
    ours, theirs = (filled([FULL], lengths) for _ in range(2))
    for _ in range(steps):
        new = tokens_to_kv(new_tokens(theirs, 1))
        written = host_step(ours)
        with theirs.step(1):
            expected = theirs.layers[0].update_and_fetch(*new)
        for one, other in zip(written, expected, strict=True):
            for row, tokens in enumerate(ours.offsets):
                assert mx.array_equal(one[row, :, :tokens], other[row, :, :tokens]).item()
    assert_rows_hold_their_tokens(ours)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    data=st.data(),
)
def test_numpy_writes_each_rows_own_tokens(lengths: list[int], data: st.DataObject) -> None:
    """Of tokens that rows may take back, each row has a number of its own, and keeps some."""
    batch = filled([FULL], lengths)
    host_step(batch)
    before = batch.offsets
    counts = [data.draw(st.integers(0, 5)) for _ in lengths]
    counts[0] += 1
    kept = [data.draw(st.integers(0, count)) for count in counts]
    widest = new_tokens(batch, max(counts))
    keys, values = (
        np.concatenate([np.array(array)[r, :, :n].swapaxes(0, 1) for r, n in enumerate(counts)])
        for array in tokens_to_kv(widest)
    )
    speculation = Speculation(batch)
    with speculation.step(max(counts), counts):
        assert written(batch.attention[0], keys, values, counts)
    speculation.commit(kept)
    assert batch.offsets == [offset + own for offset, own in zip(before, kept, strict=True)]
    assert_rows_hold_their_tokens(batch)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    leaving=st.integers(0, 4),
    joining=st.integers(0, 9),
    steps=st.integers(1, 9),
)
def test_numpy_writes_nothing_that_is_still_to_be_read(
    lengths: list[int], leaving: int, joining: int, steps: int
) -> None:
    """A row's state that is taken but not evaluated stays, when another row gets its number."""
    batch = filled([FULL], lengths)
    host_step(batch)
    taken = batch.extract(leaving % len(batch))
    batch.leave([leaving % len(batch)])
    mx.eval(batch.take_moves())
    batch.join(filled([FULL], [joining]).extract(0) if joining else None)
    for _ in range(steps):
        host_step(batch)
    (piece,) = taken.layers
    assert isinstance(piece, KVPiece)
    wanted = tokens_to_kv(1000 * (leaving % len(lengths)) + np.arange(taken.stop)[None])
    for found, expected in zip(piece.arrays, wanted, strict=True):
        assert mx.array_equal(found, expected).item()


def test_numpy_writes_into_columns_of_an_only_row_that_were_all_cleared() -> None:
    """All of both buffers once was the one zero that fills others as well."""
    batch = filled([FULL], [3])
    host_step(batch)
    batch.leave([0], nonfinite=[0])
    batch.join()
    for _ in range(3):
        host_step(batch)
    assert_rows_hold_their_tokens(batch)
    batch.resize(Capacity(2, 100))
    assert not np.array(batch.attention[0].keys)[0, :, 3:].any()


def test_numpy_writes_into_an_isolated_copy_only() -> None:
    batch = filled([FULL], [3, 7])
    host_step(batch)
    copied = Speculation(batch, isolated=True).batch
    host_step(batch)
    keys, values = np.zeros((2, 2, 3), np.float32), np.zeros((2, 2, 5), np.float32)
    with copied.step(1):
        assert written(copied.attention[0], keys, values, [1, 1])
    assert_rows_hold_their_tokens(batch)


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=3),
    back=st.integers(1, 6),
    steps=st.integers(1, 8),
    way=st.sampled_from(["take_back", "rewind", "restore"]),
)
def test_snapshots_that_share_memory_outlive_a_rewind(
    lengths: list[int], back: int, steps: int, way: str
) -> None:
    batch = filled([FULL], lengths)
    host_step(batch)
    taken = [batch.extract(row) for row in range(len(batch))]
    mx.eval([snapshot.layers[0].arrays for snapshot in taken])  # type: ignore[union-attr]
    if way == "take_back":
        batch.take_back(1, [0] * len(batch))
    elif way == "rewind":
        assert batch.rewind(0, max(0, batch.offsets[0] - back))
    else:
        batch.restore(0, Snapshot(0, 0, (None,)))
    for _ in range(steps):
        counts = [1] * len(batch)
        keys = np.full((len(batch), 2, 3), -7, np.float32)
        values = np.full((len(batch), 2, 5), -7, np.float32)
        layer = batch.attention[0]
        with batch.step(1):
            if not written(layer, keys, values, counts):
                layer.update_and_fetch(*(mx.array(new)[:, :, None] for new in (keys, values)))
    for row, snapshot in enumerate(taken):
        (piece,) = snapshot.layers
        assert isinstance(piece, KVPiece)
        wanted = tokens_to_kv(1000 * row + np.arange(snapshot.stop)[None])
        for found, expected in zip(piece.arrays, wanted, strict=True):
            assert mx.array_equal(found, expected).item()
    assert written(layer, keys, values, counts), "one write by MLX is enough"


@pytest.mark.parametrize("case", ["empty", "quantized"])
def test_numpy_leaves_other_layers_to_mlx(case: str) -> None:
    quantization = Quantization(8, 32) if case == "quantized" else None
    batch = BatchCache([FULL], quantization)
    batch.join()
    keys, values = (np.ones((1, 2, 32), np.float32) for _ in range(2))
    new = [mx.array(array)[:, :, None] for array in (keys, values)]
    if case != "empty":
        with batch.step(1):
            batch.layers[0].update_and_fetch(*new)
    with batch.step(1):
        assert not written(batch.attention[0], keys, values, [1])
        batch.layers[0].update_and_fetch(*new)
    assert batch.offsets == [1 if case == "empty" else 2]
