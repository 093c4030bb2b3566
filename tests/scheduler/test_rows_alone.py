"""Steps without prompts that show how long the rows alone take."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.loop import EngineLoop

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.chunks import Chunks
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence

LIMITS = Limits(
    256,
    1280,
    10**10,
    KVGeometry(1000),
    step_seconds=0.02,
    max_step_stretch=2.0,
    paged=True,
)


def _prompts(rng: random.Random, count: int, least: int, most: int, output: int) -> list[Sequence]:
    """Sequences with ``least`` to ``most`` prompt tokens and at most ``output`` others."""
    lengths = [(rng.randint(least, most), rng.randint(output // 2, output)) for _ in range(count)]
    return [Sequence(f"{rng.random()}", [1] * prompt, new) for prompt, new in lengths]


def _served(loop: EngineLoop, seconds: Callable[[Work], float]) -> Iterator[Plan]:
    """Serves all sequences, and yields the plan of each step, which takes ``seconds``."""
    while not loop.scheduler.idle or loop.in_flight:
        plan = loop.step()
        yield plan
        loop.scheduler.learn(plan.work, seconds(plan.work))


@given(
    seed=st.integers(0, 10**6),
    step=st.floats(2e-3, 6e-3),
    row=st.floats(1e-6, 3e-5),
    launches=st.floats(2e-3, 5e-3),
    token=st.floats(1.5e-5, 3e-5),
)
@settings(max_examples=5, deadline=None)
def test_a_burst_after_loads_of_few_rows_makes_no_long_steps(
    seed: int, step: float, row: float, launches: float, token: float
) -> None:
    """All steps of the burst are full of prompts, so that these would not show the rows' time.

    Args:
        launches: what a step of more than 16 rows takes longer, whether there are 17 or 256.
    """
    rng = random.Random(seed)

    def seconds(work: Work) -> float:
        many = launches if work.rows + work.tokens > 16 else 0.0
        rows = step + many + row * work.rows + 3e-8 * work.context
        return rows + token * work.tokens + 2e-9 * work.pairs

    loop = EngineLoop(LIMITS)
    few = _prompts(rng, 3, 200, 200, 40)
    some = _prompts(rng, rng.randint(30, 70), 300, 300, 80)
    long = _prompts(rng, 2, 20_000, 32_000, 4)
    burst = _prompts(rng, 256, 20, 900, 90)
    for load in (*rng.sample([few, some, long], k=3), burst):
        for sequence in load:
            loop.scheduler.add(sequence)
        for plan in _served(loop, lambda work: seconds(work) * rng.uniform(0.98, 1.02)):
            alone = seconds(plan.work._replace(tokens=0, pairs=0, prompts=0))
            if load is burst and plan.decode:
                assert seconds(plan.work) <= 1.3 * max(0.02, 2 * alone, alone + 2 * launches)


@given(seed=st.integers(0, 10**6), row=st.floats(1e-6, 1e-2), rows=st.integers(1, 256))
@settings(max_examples=10, deadline=None)
def test_prompts_are_left_out_of_few_steps(seed: int, row: float, rows: int) -> None:
    """Also where rows alone take longer than a step should."""
    rng = random.Random(seed)

    def seconds(work: Work) -> float:
        return (5e-3 + row * work.rows + 2e-5 * work.tokens) * rng.uniform(0.98, 1.02)

    loop = EngineLoop(replace(LIMITS, max_rows=rows))
    scheduler = loop.scheduler
    for sequence in _prompts(rng, 10 + rows, 20, 300, 60):
        scheduler.add(sequence)
    left_out = in_turn = 0
    for plan in _served(loop, seconds):
        free = len(plan.decode) < rows
        waits = bool(scheduler.prefilling) or (free and any(scheduler.waiting.ready))
        in_turn = in_turn + 1 if waits and not plan.chunks else 0
        left_out += in_turn > 0
        assert in_turn <= 1, "two steps, one after the other"
    assert left_out <= 60


def test_such_a_step_has_no_drafts_and_the_next_one_has_prompts() -> None:
    scheduler = Scheduler(replace(LIMITS, draft_tokens=8))
    first, second = _prompts(random.Random(0), 2, 100, 100, 50)
    scheduler.add(first)
    plan = scheduler.plan((NO_CAPACITY,))
    scheduler.commit(plan)
    scheduler.learn(plan.work, 0.01)
    scheduler.read(first, [7])
    scheduler.add(second)
    plan = scheduler.plan(plan.capacities, {first: [7, 7]})
    assert (list(plan.decode), plan.drafts, plan.chunks) == ([first], {}, {})
    scheduler.commit(plan)
    scheduler.read(first, [7])
    plan = scheduler.plan(plan.capacities, {first: [7, 7]})
    assert plan.drafts == {first: [7, 7]}
    assert plan.chunks == {second: 100}


@given(
    seed=st.integers(0, 10**6),
    step=st.floats(2e-3, 6e-3),
    launches=st.floats(2e-3, 5e-3),
    row=st.floats(0.0, 2e-5),
    token=st.floats(1.5e-5, 3e-5),
)
@settings(max_examples=15, deadline=None)
def test_a_cost_that_the_fit_gives_to_the_wrong_number_stretches_no_steps(
    seed: int, step: float, launches: float, row: float, token: float
) -> None:
    """In a burst all steps are full, so that each further row has one prompt token less."""
    rng = random.Random(seed)

    def seconds(work: Work) -> float:
        many = launches if work.rows + work.tokens > 16 else 0.0
        rows = step + many + row * work.rows + 3e-8 * work.context
        return rows + token * work.tokens + 2e-9 * work.pairs

    chunks = Chunks(LIMITS)
    ended = [Work(rows, 700 * rows) for rows in range(220, 0, -1)]
    some = [Work(64, 64 * (300 + number)) for number in range(40)]
    beside = [Work(64, 64 * 340).with_chunk(begun, 600) for begun in range(0, 32_000, 600)]
    alone = [Work().with_chunk(begun, 1280) for begun in range(0, 32_000, 1280)]
    for work in (*ended, *some, *beside, *alone):
        chunks.seconds(work, Sequence("a", [1] * 32_000, 10))
        chunks.learn(work, seconds(work) * rng.uniform(0.98, 1.02))
    for rows in range(20, 250, 2):
        work = Work(rows, 300 * rows)
        allowed = chunks.seconds(work, Sequence("a", [1] * 400, 10))
        most = max(0.02, 2 * seconds(work), seconds(work) + 2 * launches)
        assert 0.02 <= allowed <= 1.1 * most
        for _ in range(4):
            work = work.with_chunk(0, (LIMITS.max_step_tokens - rows) // 4)
        chunks.learn(work, seconds(work) * rng.uniform(0.98, 1.02))
