"""One token of recurrent layers: kernels give the rules' results; states change in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.state import StateLayer, host_state
from chairlift.engine.cpu.compiled import recurrence, recurrent_layers
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.model.layers.decayed import decayed_attention
from chairlift.engine.model.layers.gated_delta import gated_delta_blocks

pytestmark = pytest.mark.skipif(not recurrence.available(), reason="this CPU has no kernel")

ROWS = st.integers(1, 5)
GROUPS = st.integers(1, 3)
SHARE = st.integers(1, 4)
LINES = st.sampled_from([1, 3, 16, 33, 128])
NUMBERS = st.sampled_from([16, 32, 48, 128, 256])
SEEDS = st.integers(0, 1 << 30)


@pytest.fixture(autouse=True, params=[1, 1 << 30], ids=["shared", "alone"])
def _shared(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "MIN_SHARED", request.param)
        yield


def _floats(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.normal(size=shape).astype(np.float32)


def _assert_close(actual: Floats, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


@given(ROWS, GROUPS, SHARE, LINES, NUMBERS, st.booleans(), st.booleans(), SEEDS)
@settings(max_examples=60)
def test_a_token_equals_the_rule(
    rows: int,
    groups: int,
    share: int,
    lines: int,
    numbers: int,
    is_delta: bool,
    is_vector: bool,
    seed: int,
) -> None:
    """Any shapes, with a decay of each head or of each number; and each row as it is alone."""
    rng = np.random.default_rng(seed)
    heads = groups * share
    state = _floats(rng, rows, heads, lines, numbers)
    k, q = (_floats(rng, rows, groups, numbers) / numbers**0.5 for _ in range(2))
    v = _floats(rng, rows, heads, lines)
    g = np.exp(-rng.exponential(size=(rows, heads, *[numbers] * is_vector))).astype(np.float32)
    beta = rng.uniform(size=(rows, heads)).astype(np.float32) if is_delta else None
    decayed = state.astype(np.float64) * (g[:, :, None] if is_vector else g[..., None, None])
    keys, queries = (np.repeat(x, share, axis=1) for x in (k, q))
    added = v - np.einsum("rhln,rhn->rhl", decayed, keys) if is_delta else v
    if beta is not None:
        added = beta[..., None] * added
    expected = decayed + added[..., None] * keys[:, :, None]
    alone = [
        (own := state[r : r + 1].copy(), recurrence.decay(own, *_row(r, k, q, v, g, beta)))
        for r in range(rows)
    ]
    output = recurrence.decay(state, k, q, v, g, beta)
    _assert_close(state, expected)
    _assert_close(output, np.einsum("rhln,rhn->rhl", expected, queries))
    for row, (own, result) in enumerate(alone):
        assert (own[0] == state[row]).all()
        assert (result[0] == output[row]).all()


def _row(row: int, *arrays: Floats | None) -> list[Floats | None]:
    return [None if x is None else x[row : row + 1] for x in arrays]


@given(ROWS, st.sampled_from([1, 5, 64, 1536]), st.sampled_from([16, 32]), SEEDS)
@settings(max_examples=40)
def test_a_token_of_a_selective_state(rows: int, lines: int, numbers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, v = _floats(rng, rows, lines, numbers), _floats(rng, rows, lines)
    k, q = (_floats(rng, rows, numbers) for _ in range(2))
    dt = rng.exponential(size=(rows, lines)).astype(np.float32)
    a = -np.exp(_floats(rng, lines, numbers))
    decays = np.exp(dt[..., None].astype(np.float64) * a)
    expected = state * decays + (dt * v)[..., None] * k[:, None]
    output = recurrence.select(state, k, q, v, dt, a)
    _assert_close(state, expected)
    _assert_close(output, np.einsum("rln,rn->rl", expected, q))


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    rng = np.random.default_rng(1)
    state, v = _floats(rng, 3, 2, 4, 16), _floats(rng, 3, 2, 4)
    k, q = (_floats(rng, 3, 1, 16) for _ in range(2))
    state[1, 0, 2, 3] = np.nan
    output = recurrence.decay(state, k, q, v, np.full((3, 2), 0.5, np.float32))
    assert np.isnan(output).nonzero()[0].tolist() == [1]
    assert set(np.isnan(state).nonzero()[0]) == {1}


@given(ROWS, GROUPS, SHARE, LINES, NUMBERS, st.booleans(), SEEDS)
@settings(max_examples=30)
def test_layers_give_the_results_of_blocks(
    rows: int, groups: int, share: int, lines: int, numbers: int, is_vector: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    heads = groups * share
    k, q = (mx.array(_floats(rng, rows, 1, groups, numbers) / numbers**0.5) for _ in range(2))
    v = mx.array(_floats(rng, rows, 1, heads, lines))
    logs = mx.array(-rng.exponential(size=(rows, 1, heads)).astype(np.float32))
    state = mx.array(_floats(rng, rows, heads, lines, numbers))
    before = np.array(state)
    expected, after = decayed_attention(q, k, v, logs, state.swapaxes(2, 3))
    result = recurrent_layers.decayed(q, k, v, mx.exp(logs), state)
    assert result is not None
    _assert_close(view(result[0]), view(expected))
    _assert_close(view(result[1]), view(after.swapaxes(2, 3)))
    g = mx.broadcast_to(mx.exp(logs)[..., None], (rows, 1, heads, numbers))
    g = g if is_vector else mx.exp(logs)
    beta = mx.array(rng.uniform(size=(rows, 1, heads)).astype(np.float32))
    expected, after = gated_delta_blocks(q, k, v, g, beta, state)
    result = recurrent_layers.gated_delta(q, k, v, g, beta, state, None)
    assert result is not None
    _assert_close(view(result[0]), view(expected))
    _assert_close(view(result[1]), view(after))
    assert (np.array(state) == before).all(), "an array that no cache handed out stays as it is"


def test_other_arrays_are_left_to_others() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (mx.array(_floats(rng, 2, 1, 2, 16)) for _ in range(3))
    g, beta = (mx.array(_floats(rng, 2, 1, 2)) for _ in range(2))
    state = mx.array(_floats(rng, 2, 2, 16, 16))
    gated_delta, decayed = recurrent_layers.gated_delta, recurrent_layers.decayed
    assert decayed(q, k, v, g, state) is not None
    half = q.astype(mx.float16), k.astype(mx.float16), v.astype(mx.float16)
    assert decayed(*half, g, state) is None
    assert decayed(q, k, v, g, state.astype(mx.bfloat16)) is None
    two = [mx.repeat(x, 2, axis=1) for x in (q, k, v, g)]
    assert decayed(*two, state) is None
    odd = q[..., :15], k[..., :15]
    assert decayed(*odd, v, g, state[..., :15]) is None
    assert gated_delta(q, k, v, g, beta, state, mx.ones((2, 1), mx.bool_)) is None
    assert gated_delta(*two, mx.repeat(beta, 2, axis=1), state, None) is None


def _written(rng: np.random.Generator, rows: int = 3) -> StateLayer:
    layer = StateLayer(2)
    for _ in range(rows):
        layer.join()
    layer[0] = mx.array(_floats(rng, rows, 3, 8))
    layer[1] = mx.array(_floats(rng, rows, 2, 4, 16))
    mx.eval(layer.state)
    return layer


def _step(layer: StateLayer, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    state = layer[1]
    assert state is not None
    rows = state.shape[0]
    q, k = (mx.array(_floats(rng, rows, 1, 1, 16)) for _ in range(2))
    v, g = mx.array(_floats(rng, rows, 1, 2, 4)), mx.array(_floats(rng, rows, 1, 2))
    result = recurrent_layers.decayed(q, k, v, g, state)
    assert result is not None
    layer[1] = result[1]


def _memory(layer: StateLayer) -> int:
    state = layer[1]
    assert state is not None
    return int(view(state).ctypes.data)


def test_a_step_changes_the_state_in_place() -> None:
    layer = _written(np.random.default_rng(0))
    _step(layer)
    memory = _memory(layer)
    for seed in range(4):
        before = np.array(layer[1])
        _step(layer, seed)
        mx.eval(layer.state)
        assert _memory(layer) == memory
        assert not (np.array(layer[1]) == before).any()


@pytest.mark.parametrize("evaluates", [True, False])
def test_what_others_hold_does_not_change(evaluates: bool) -> None:
    """A checkpoint, a row, a copy, and a state that a checkpoint was restored to."""
    layer = _written(np.random.default_rng(0))
    _step(layer)
    before = np.array(layer[1])
    checkpoint, row, twin = layer.checkpoint(), layer.get(1), copy.deepcopy(layer)
    assert row is not None
    if evaluates:
        mx.eval(list(checkpoint.values()), row.slots, twin.state)
    _step(layer)
    assert (np.array(checkpoint[1]) == before).all()
    assert (np.array(row.slots[1]) == before[1:2]).all()
    assert (np.array(twin[1]) == before).all()
    assert not (np.array(layer[1]) == before).any()
    for _ in range(2):
        layer.reset_rows({0: checkpoint}, [0] * 3)
        assert (np.array(layer[1]) == before).all()
        _step(layer)
        assert (np.array(checkpoint[1]) == before).all()
        mixed = {0: checkpoint, 1: layer.checkpoint()}
        layer.reset_rows(mixed, [0, 1, 1])
        _step(layer)
        assert (np.array(checkpoint[1]) == before).all()
    put = StateLayer.of(checkpoint, 2, 3)
    _step(put)
    assert (np.array(checkpoint[1]) == before).all()


@given(st.lists(st.sampled_from(["step", "join", "put", "leave", "keep", "reset"]), max_size=25))
@settings(max_examples=40)
def test_rows_are_those_of_layers_of_their_own(actions: list[str]) -> None:
    """Random steps, joins, leaves and restored snapshots, beside a layer that never shares."""
    layer, plain = _written(np.random.default_rng(0)), _written(np.random.default_rng(0))
    kept: list[tuple[dict[int, mx.array], dict[int, mx.array], int]] = []
    rows = 3
    for number, action in enumerate(actions):
        if action == "step":
            _step(layer, number)
            plain[1] = mx.array(np.array(plain[1]))
            _step(plain, number)
        elif action == "join":
            for each in (layer, plain):
                each.join()
            rows += 1
        elif action == "put" and rows:
            for each in (layer, plain):
                each.put(number % rows, each.get(0))
        elif action == "leave" and rows > 1:
            rows -= 1
            for each in (layer, plain):
                each.rearrange(range(rows))
        elif action == "keep":
            copied = {slot: mx.array(np.array(x)) for slot, x in plain.checkpoint().items()}
            kept.append((dict(layer.checkpoint()), copied, rows))
        elif action == "reset" and kept and kept[-1][2] == rows:
            layer.reset_rows({0: kept[-1][0]}, [0] * rows)
            plain.reset_rows({0: kept[-1][1]}, [0] * rows)
        for slot in (0, 1):
            assert (np.array(layer[slot]) == np.array(plain[slot])).all()
    for taken, copied, _ in kept:
        assert all((np.array(taken[slot]) == np.array(copied[slot])).all() for slot in (0, 1))


def test_only_a_slot_that_was_just_read_may_change() -> None:
    layer = _written(np.random.default_rng(0))
    state = layer[1]
    assert state is not None
    assert layer[0] is not None
    assert host_state(state) is None, "another slot was read since"
    state = layer[1]
    assert state is not None
    assert host_state(copy.copy(state)) is None
    assert host_state(state) is not None
    layer[1] = mx.array(np.array(state))
    assert host_state(state) is None, "the layer has another state"
