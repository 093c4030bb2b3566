"""The cost model: it learns how long steps take from few of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.machine import machine

from chairlift.scheduler.cost import CostModel, Work


@pytest.mark.parametrize("speed", [1.0, 0.05])
def test_costs_are_learned_from_few_steps_of_a_noisymachine(speed: float) -> None:
    random_, model, seconds = random.Random(0), CostModel(), machine(speed)
    for _ in range(60):
        rows = random_.randrange(256)
        work = Work(rows, rows * random_.randrange(100, 900))
        if random_.random() < 0.5:
            work = work.with_chunk(random_.choice([0, 500]), random_.randrange(1, 1000))
        took = seconds(work) * random_.uniform(0.9, 1.1)
        model.learn(work, took * (20 if random_.random() < 0.03 else 1))
    for work in (Work(200, 100_000), Work(3, 900), Work(100, 50_000).with_chunk(0, 512)):
        assert model.seconds(work) == pytest.approx(seconds(work), rel=0.25)
    room = model.tokens_within(Work(50, 25_000), 0.03 / speed, 0)
    exact = (0.03 / speed - seconds(Work(50, 25_000))) / (2.8e-5 / speed)
    assert room == pytest.approx(exact, rel=0.25)
    assert model.tokens_within(Work(50, 25_000), 0.001 / speed, 0) == 0


def test_the_model_follows_a_machine_that_becomes_slower() -> None:
    model = CostModel()
    for speed in (1.0, 0.25):
        for _ in range(200):
            model.learn(Work(10, 5000), machine(speed)(Work(10, 5000)))
    assert model.seconds(Work(10, 5000)) == pytest.approx(machine(0.25)(Work(10, 5000)), rel=0.1)


def test_steps_of_few_rows_do_not_push_out_those_of_many() -> None:
    """A fit through noisy steps of few rows would say anything about many."""
    random_, model, seconds = random.Random(0), CostModel(), machine(1.0)
    for rows in [*range(1, 257, 4), *[random_.randrange(1, 15) for _ in range(2000)]]:
        work = Work(rows, rows * random_.randrange(100, 900))
        # Few rows wait for the host, which takes as long for each number of rows.
        model.learn(work, max(seconds(work), 8e-3) * random_.uniform(0.8, 1.2))
        model.seconds(work)
    for rows in (100, 140, 250):
        work = Work(rows, 500 * rows)
        assert model.seconds(work) == pytest.approx(seconds(work), rel=0.25)


def test_a_step_of_zero_seconds_does_no_harm() -> None:
    model = CostModel()
    model.learn(Work(1, 10), 0.0)
    for _ in range(100):
        model.learn(Work(1, 10), 0.01)
    assert model.seconds(Work(1, 10)) == pytest.approx(0.01, rel=0.1)


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 64), st.integers(0, 900), st.integers(0, 9000), st.floats(1e-4, 1)
        ),
        max_size=30,
    ),
    rows=st.integers(0, 256),
    begun=st.integers(0, 100_000),
    seconds=st.floats(1e-4, 2.0),
    scored=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_tokens_that_fit_are_as_many_as_the_model_predicts(
    steps: list[tuple[int, int, int, float]],
    rows: int,
    begun: int,
    seconds: float,
    scored: bool,
) -> None:
    """Also if a fit says that tokens cost nothing but the tokens that they attend to do."""
    model = CostModel()
    for step_rows, tokens, before, took in steps:
        work = Work(step_rows, 300 * step_rows)
        model.learn(work.with_chunk(before, tokens) if tokens else work, took)
    work = Work(rows, 300 * rows)
    fitting = model.tokens_within(work, seconds, begun, scored)
    assert fitting >= 0
    if fitting >= 1:
        most = int(min(fitting, 10**6))
        predicted = model.seconds(work.with_chunk(begun, most, scored))
        assert predicted <= seconds * (1 + 1e-6)
    if fitting < 10**6:
        predicted = model.seconds(work.with_chunk(begun, int(fitting) + 1, scored))
        assert predicted >= seconds * (1 - 1e-6)
