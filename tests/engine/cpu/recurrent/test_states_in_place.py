"""States change in place, unless anything else refers to their memory."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.state import StateLayer, host_state
from chairlift.engine.cpu.compiled import recurrence
from chairlift.engine.cpu.compiled import recurrent_layers as layer_kernels
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view

pytestmark = pytest.mark.skipif(not recurrence.available(), reason="this CPU has no kernel")


def _floats(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.normal(size=shape).astype(np.float32)


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
    result = layer_kernels.decayed(q, k, v, g, state)
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


ACTIONS = ["step", "step", "join", "put", "leave", "keep", "reset", "evaluate", "copy"]


@given(st.lists(st.sampled_from(ACTIONS), max_size=25))
@settings(max_examples=80)
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
        elif action == "evaluate":
            mx.eval(layer.state)
        elif action == "copy":
            copied = {slot: mx.array(np.array(x)) for slot, x in plain.checkpoint().items()}
            kept.append((dict(copy.deepcopy(layer).checkpoint()), copied, rows))
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
