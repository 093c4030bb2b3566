"""Graphs that a thread dispatches while others are built."""

from __future__ import annotations

import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from chairlift.engine.device import profile
from chairlift.engine.device.dispatch import (
    CallerDispatch,
    Dispatcher,
    ThreadDispatch,
    make_dispatcher,
)

DISPATCHERS = [CallerDispatch, ThreadDispatch]

pytestmark = pytest.mark.usefixtures("same_stream")


@mx.compile
def _layer(state: mx.array, more: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Three results of one operation, which refer to each other until they are computed."""
    mixed = mx.sin(state) * 3 + more
    return mixed, mx.abs(mixed) - 1, mixed * 0.5


def _run(dispatcher: Dispatcher, steps: int, seed: int) -> list[float]:
    """What each step's results add up to: a step reads what the one before has computed."""
    rng = random.Random(seed)
    state, sums = mx.arange(rng.randrange(1, 40)).astype(mx.float32), []
    running: mx.array | None = None
    for number in range(steps):
        held = []
        for _ in range(rng.randrange(1, 12)):
            more = mx.array(np.full(state.shape, number % 7, np.float32))
            state, other, third = _layer(state, more)
            held.append(other)
            state = state + third
        total = mx.sum(mx.stack(held)) + mx.sum(state)
        dispatcher.dispatch([total, state, *held[:3]])
        if running is not None:
            sums.append(float(running))
        running = total
        if rng.random() < 0.05:
            dispatcher.wait_dispatched()
            mx.eval(state)
    assert running is not None
    dispatcher.wait_dispatched()
    return [*sums, float(running)]


@pytest.mark.parametrize("seed", range(4))
def test_a_thread_computes_the_same(seed: int) -> None:
    assert _run(ThreadDispatch(), 400, seed) == _run(CallerDispatch(), 400, seed)


@pytest.mark.parametrize("make", DISPATCHERS)
def test_results_become_available_in_order(make: Callable[[], Dispatcher]) -> None:
    dispatcher = make()
    first = mx.zeros((3,)) + 1
    last = mx.zeros((1,))
    dispatcher.dispatch([first, last])
    second = first + 1
    dispatcher.dispatch([second])
    mx.eval(last)
    dispatcher.wait_dispatched()
    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [2, 2, 2])


def test_what_another_thread_cannot_dispatch_is_raised_in_this_one() -> None:
    dispatcher = ThreadDispatch()
    broken = mx.linalg.inv(mx.zeros((2, 3, 3)), stream=mx.new_stream(mx.default_device()))
    dispatcher.dispatch([broken])
    with pytest.raises(RuntimeError, match="in current thread"):
        dispatcher.wait_dispatched()
    dispatcher.wait_dispatched()
    assert _run(dispatcher, 10, 0) == _run(CallerDispatch(), 10, 0)


def test_only_one_process_with_such_a_device_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not make_dispatcher().threaded
    monkeypatch.setattr(profile, "current", lambda: profile.CUDA)
    assert make_dispatcher().threaded
    assert not make_dispatcher(2).threaded
