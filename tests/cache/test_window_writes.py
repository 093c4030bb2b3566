"""Windows: what tokens see, and tokens that NumPy writes while snapshots share the buffers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.cache.rows import filled, written
from support.engine.kv import tokens_to_kv

from chairlift.cache.ring import Ring
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    window=st.integers(2, 12),
    moves=st.lists(
        st.tuples(st.sampled_from(["step", "step", "extract", "leave", "join"]), st.integers(0, 9)),
        min_size=1,
        max_size=24,
    ),
    evaluates=st.booleans(),
)
def test_snapshots_keep_their_tokens_while_numpy_writes_windows(
    lengths: list[int], window: int, moves: list[tuple[str, int]], evaluates: bool
) -> None:
    """Also those that are not evaluated yet, and those that rows were restored from."""
    kinds = [LayerKind(window)]
    batch = filled(kinds, lengths)
    names, by_numpy = list(range(len(lengths))), 0
    kept: list[tuple[int, Snapshot]] = []
    for move, number in moves:
        row = number % len(batch) if len(batch) else 0
        if move == "extract" and len(batch):
            kept.append((names[row], batch.extract(row)))
            if evaluates:
                mx.eval([piece.arrays for piece in kept[-1][1].layers])  # type: ignore[union-attr]
        elif move == "leave" and len(batch) > 1:
            names = [names[old] for old in batch.leave([row])]
            mx.eval(batch.take_moves())
        elif move == "join" and kept:
            name, snapshot = kept[number % len(kept)]
            batch.join(snapshot)
            mx.eval(batch.take_moves())
            names.append(name)
        elif move == "step":
            offsets = zip(names, batch.offsets, strict=True)
            tokens = np.array([[1000 * name + offset] for name, offset in offsets])
            keys, values = (np.array(array)[:, :, 0] for array in tokens_to_kv(tokens))
            layer = batch.attention[0]
            with batch.step(1):
                if written(layer, keys, values, [1] * len(batch)):
                    by_numpy += 1
                else:
                    layer.update_and_fetch(*(mx.array(new)[:, :, None] for new in (keys, values)))
    kept += [(name, batch.extract(row)) for row, name in enumerate(names)]
    for name, snapshot in kept:
        (piece,) = snapshot.layers
        assert isinstance(piece, KVPiece)
        tokens = 1000 * name + np.arange(snapshot.stop - piece.tokens, snapshot.stop)[None]
        for found, expected in zip(piece.arrays, tokens_to_kv(tokens), strict=True):
            assert np.array_equal(np.array(found), np.array(expected))
    steps = [move for move, _ in moves]
    if len(steps) > 1 and set(steps) == {"step"}:
        assert by_numpy >= len(steps) - 1


@given(
    window=st.sampled_from([None, 2, 5, 9]),
    columns=st.integers(1, 14),
    rows=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=4
    ),
)
def test_what_tokens_see_is_what_the_mask_shows(
    window: int | None, columns: int, rows: list[tuple[int, int, int]]
) -> None:
    counts = [count for _, _, count in rows]
    step = max(counts)
    # The buffer has room for the step, as ``Ring.needed`` demands.
    columns = columns + step if window is None else max(columns, window - 1 + step)
    lengths = [length % (columns - step + 1) for length, _, _ in rows]
    cursors = lengths if window is None else [start % columns for _, start, _ in rows]
    ring = Ring(window, len(rows), columns, list(cursors), lengths)
    seen = ring.seen(counts)
    mask = np.array(ring.mask(step, as_array=True))[:, 0]
    if seen is None:
        assert window is not None
        assert any(n > 1 and old + n > window for old, n in zip(lengths, counts, strict=True))
        return
    for row, (span, count) in enumerate(zip(seen, counts, strict=True)):
        for token in range(count):
            shown = {(span[1] + i) % columns for i in range(span[0] + token + 1)}
            assert set(np.flatnonzero(mask[row, token])) == shown
