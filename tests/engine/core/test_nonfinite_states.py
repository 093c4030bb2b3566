"""Keys and values that are not finite do not spread to the next sequence in the same row.

A mask multiplies hidden values by zero, and zero times NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.bench import Bench
from support.tiny import VOCAB_SIZE, tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot
from chairlift.engine.cpu import kernels
from chairlift.engine.messages import Abort

# The token whose embedding is NaN.
BROKEN = 200
LONG = list(range(3, 60))


def broken_model() -> Any:
    model = tiny_model("llama", seed=6, tied=False)
    weight = model.model.embed_tokens.weight
    rows = mx.arange(VOCAB_SIZE)[:, None] == BROKEN
    model.model.embed_tokens.weight = mx.where(rows, mx.nan, weight)
    mx.eval(model.parameters())
    return model


def make_bench(eager: bool) -> Bench:
    model = broken_model()
    if eager:
        kernels.install(model)
    return Bench(model, eager=eager, rows=3, tokens=80)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        # BROKEN is in the prompt; is generated, and fed; ends the text, and is fed nevertheless.
        {"prompt": [5, BROKEN, *range(20, 50)]},
        {"prompt": LONG[::-1], "logit_bias": {BROKEN: 100.0}},
        {"prompt": LONG[::-1], "logit_bias": {BROKEN: 100.0}, "stop_token_ids": (BROKEN,)},
        {"prompt": LONG[::-1], "logit_bias": {BROKEN: 100.0}, "count": 1},
    ],
    ids=["prompt", "chosen", "stop", "length"],
)
def test_a_broken_row_does_not_affect_the_next(bad: dict[str, Any], eager: bool) -> None:
    """A short row takes the broken one's place; beside a long row it masks columns."""
    alone = make_bench(eager)
    alone.submit("long", LONG, 40)
    alone.drain()
    expected = {"long": alone.tokens("long")}
    for number in range(3):
        alone.submit(f"short {number}", [90 + number], 12)
        alone.drain()
        expected[f"short {number}"] = alone.tokens(f"short {number}")
    bench = make_bench(eager)
    bench.submit("long", LONG, 40)
    bench.step()
    bench.submit("bad", **bad)
    while not bench.outputs.get(("bad", 0)) or bench.outputs["bad", 0][-1].finish is None:
        bench.step()
    for number in range(3):
        bench.step()
        bench.submit(f"short {number}", [90 + number], 12)
    bench.drain()
    assert {name: bench.tokens(name) for name in expected} == expected
    assert all(bench.outputs[name, 0][-1].finish == "length" for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_wrong_draft_does_not_affect_the_next_row(steps: int, eager: bool) -> None:
    """A client disconnects while its draft, which is BROKEN, is verified or was found wrong."""

    def serve(prediction: list[int], steps: int) -> Bench:
        model = broken_model()
        if eager:
            kernels.install(model)
        bench = Bench(model, eager=eager, rows=2, tokens=80, draft=5)
        core = bench.core
        core.scheduler.choose_drafts = (  # type: ignore[method-assign]
            lambda drafts: {s: draft.tokens for s, draft in drafts.items()}
        )
        bench.submit("long", LONG, 60)
        bench.step()
        bench.submit("client", [9, 8, 7, 6], 40, reading={"prediction": prediction})
        for number in range(3):
            bench.submit(f"short {number}", [90 + number], 12)
        for _ in range(steps):
            bench.step()
        core.abort(Abort("client"))
        bench.drain()
        return bench

    first = serve([], 3).tokens("client")[:1]
    plain, drafted = serve([], steps), serve([*first, *[BROKEN] * 8], steps)
    for name in ("long", *(f"short {number}" for number in range(3))):
        assert drafted.outputs[name, 0][-1].error is None
        assert drafted.tokens(name) == plain.tokens(name)


@given(data=st.data(), kind=st.sampled_from([LayerKind(None), LayerKind(8)]))
def test_columns_that_are_not_finite_reach_no_later_user_of_a_row(
    data: st.DataObject, kind: LayerKind
) -> None:
    """Rows join, leave and move in any order; some leave NaN behind their cursor."""
    batch, broken = BatchCache([kind]), []
    layer = batch.attention[0]
    for _ in range(data.draw(st.integers(1, 12))):
        if len(batch) and data.draw(st.booleans()):
            leaving = data.draw(st.sets(st.integers(0, len(batch) - 1), min_size=1))
            order = batch.leave(leaving, {row for row, is_broken in enumerate(broken) if is_broken})
            broken = [broken[row] for row in order]
        else:
            tokens = data.draw(st.integers(1, 11))
            values = mx.ones((1, 2, min(tokens, kind.window or tokens), 4))
            batch.join(Snapshot(0, tokens, (KVPiece(values, values),)), columns=12)
            broken.append(False)
        mx.eval(batch.take_moves())
        ring, keys, values = layer.ring, layer.keys, layer.values
        if keys is None or values is None:
            continue
        for row, is_broken in enumerate(broken):
            stale = ring.spans(
                ring.cursors[row] - ring.lengths[row], ring.columns - ring.lengths[row]
            )
            if not is_broken:
                assert mx.isfinite(keys[row]).all()
                assert mx.isfinite(values[row]).all()
                broken[row] = data.draw(st.booleans())
            if broken[row]:
                for span in stale:
                    keys[row, :, span.start : span.stop] = mx.nan
                    values[row, :, span.start : span.stop] = mx.nan


def test_rows_that_leave_are_overwritten() -> None:
    """Completely if they are not finite; else the newest column, when another sequence joins."""
    batch = BatchCache([LayerKind(None), LayerKind(8)])
    for _ in range(4):
        batch.join(columns=12)
    with batch.step(5):
        for number, layer in enumerate(batch.attention):
            new = mx.arange(4.0)[:, None, None, None] + mx.ones((4, 2, 5, 4)) * (number + 1)
            layer.update_and_fetch(new, -new)
    before = [mx.array(array) for array in batch.state]
    assert batch.leave({1, 2}, nonfinite={1}) == [0, 3]
    mx.eval(batch.take_moves(), batch.state)
    for old, new in zip(before, batch.state, strict=True):
        columns = old.shape[2]
        assert mx.array_equal(new[0], old[0])
        assert mx.array_equal(new[1, :, :5], old[3, :, :5])
        assert not new[1, :, 5:columns].any()
        assert mx.array_equal(new[2:], old[2:])
    assert [batch.join(), batch.join()] == [2, 3]
    for old, new in zip(before, batch.state, strict=True):
        assert mx.array_equal(new[2:, :, :4], old[2:, :, :4])
        assert not new[2:, :, 4].any()


@pytest.mark.parametrize("tokens", [2, 3])
def test_a_row_that_moves_hides_the_newest_column_of_the_row_before(tokens: int) -> None:
    """A step that is not read yet may have written NaN there; the row may have a token there."""
    batch = BatchCache([LayerKind()])
    for count in (3, 3, tokens):
        values = mx.ones((1, 2, count, 4))
        if not batch.offsets:
            values[:, :, -1] = mx.nan
        batch.join(Snapshot(0, count, (KVPiece(values, values),)), columns=8)
    assert batch.leave({0}) == [2, 1]
    mx.eval(batch.take_moves())
    assert all(
        mx.array_equal(array[0, :, :tokens], mx.ones((2, tokens, 4))) for array in batch.state
    )
    assert all(mx.isfinite(array).all() for array in batch.state)
