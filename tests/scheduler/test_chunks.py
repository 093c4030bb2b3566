"""Sizes of prompt chunks: steps with running rows keep to their time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.machine import machine

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.chunks import LONG_PROMPT_STEPS, MIN_CHUNK, Chunks
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_times import KNOWN


def _served(
    limits: Limits,
    seconds: Callable[[Work], float],
    on_plan: Callable[[Plan], None] = lambda plan: None,
    spent: float = 0.0,
) -> list[tuple[Work, float]]:
    """Serves forty prompts, a few of them long; returns work and seconds of steps with rows.

    Other work takes ``spent`` seconds of each step's time.
    """
    random_, scheduler = random.Random(1), Scheduler(limits)
    for number in range(40):
        prompt = 4_000 if number % 13 == 5 else random_.randrange(50, 700)
        scheduler.add(Sequence(str(number), [1] * prompt, random_.randrange(100, 300)))
    capacities, in_flight, steps = (NO_CAPACITY,), list[Sequence](), list[tuple[Work, float]]()
    while not scheduler.idle or in_flight:
        plan = scheduler.plan(capacities, spent=spent)
        on_plan(plan)
        scheduler.commit(plan)
        capacities = plan.capacities
        took = seconds(plan.work) * random_.uniform(0.95, 1.05)
        scheduler.learn(plan.work, took)
        if plan.decode:
            steps.append((plan.work, took))
        for sequence in in_flight:
            scheduler.read(sequence, [7])
            if len(sequence.tokens) == sequence.max_total_tokens:
                scheduler.finish(sequence)
        in_flight = [*plan.decode, *plan.joins]
    return steps


def _limits(step_seconds: float, stretch: float) -> Limits:
    return Limits(
        32, 1056, 10**9, KVGeometry(1000), step_seconds=step_seconds, max_step_stretch=stretch
    )


def test_steps_beside_rows_keep_to_their_time() -> None:
    seconds = machine(1.0)
    steps = _served(_limits(0.02, 0.0), seconds)
    late = [took for _, took in steps[5:] if took > 1.1 * 0.02]
    assert len(late) <= len(steps) / 100
    assert max(took for _, took in _served(_limits(1e9, 0.0), seconds)) > 0.03
    prompts = [work.tokens for work, _ in steps if work.tokens > 0]
    assert sum(prompts) / len(prompts) > 300, "prompts use the time that they have"


def test_prompts_have_the_time_that_other_work_leaves() -> None:
    seconds = machine(1.0)
    for spent, most in ((0.01, 0.01), (0.05, 0.02)):  # with no time left, prompts have a minimum
        steps = _served(_limits(0.02, 0.0), seconds, spent=spent)
        late = [took for _, took in steps[5:] if took > 1.1 * most]
        assert len(late) <= len(steps) / 100
        assert any(work.tokens for work, _ in steps)


def test_prompts_may_take_as_long_as_the_rows_themselves() -> None:
    seconds = machine(0.05)  # rows alone take several times 20 ms
    for work, took in _served(_limits(0.02, 2.0), seconds)[10:]:
        alone = seconds(work._replace(tokens=0, pairs=0))
        assert took <= 1.3 * max(0.02, 2 * alone)


def test_prompts_use_steps_that_any_prompt_makes_long() -> None:
    """As where steps of rows alone are compiled, and others are not."""

    def seconds(work: Work) -> float:
        return 3e-3 + 4e-5 * work.rows + (15e-3 + 3e-5 * work.tokens if work.tokens else 0.0)

    for stretch, (least, most) in ((1.75, (200, 0.05)), (0.0, (0, 0.022))):
        steps = _served(_limits(0.02, stretch), seconds)[10:]
        prompts = [(work.tokens, took) for work, took in steps if work.tokens]
        assert sum(tokens for tokens, _ in prompts) / len(prompts) > least
        times = sorted(took for _, took in prompts)
        assert times[len(times) * 9 // 10] < most


@given(
    seed=st.integers(0, 1000),
    row=st.floats(1e-5, 5e-4),
    first=st.floats(0.0, 0.02),
    stretch=st.floats(1.1, 1.9),
)
@settings(max_examples=40, deadline=None)
def test_steps_are_stretched_once_the_time_of_their_rows_is_known(
    seed: int, row: float, first: float, stretch: float
) -> None:
    """Where requests come all at once, the first hundred steps all have prompts."""
    random_ = random.Random(seed)

    def seconds(work: Work) -> float:
        return 5e-3 + row * work.rows + (first + 2e-5 * work.tokens if work.tokens else 0.0)

    chunks = Chunks(_limits(0.02, stretch))
    for rows in range(1, 130):
        work = Work(rows, 500 * rows).with_chunk(0, random_.randrange(100, 900))
        chunks.learn(work, seconds(work))
    rows_only = Work(130, 65_000)
    assert chunks.needs_rows_alone(130)
    assert chunks.seconds(rows_only, Sequence("a", [1] * 300, 10)) == 0.02
    for _ in range(KNOWN):
        chunks.learn(rows_only, seconds(rows_only))
    assert not chunks.needs_rows_alone(130)
    allowed = chunks.seconds(rows_only, Sequence("a", [1] * 300, 10))
    least = max(0.02, stretch * seconds(rows_only))
    most = max(least, 1.5 * (seconds(rows_only) + 2 * first))
    assert 0.95 * least <= allowed <= 1.01 * most


@given(
    seed=st.integers(0, 1000),
    row=st.floats(1e-5, 5e-3),
    context=st.floats(0.0, 2e-8),
    first=st.floats(0.0, 0.01),
    users=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_steps_of_few_rows_do_not_say_how_long_many_rows_take(
    seed: int, row: float, context: float, first: float, users: int
) -> None:
    """A few users one after the other, then a burst whose steps all have prompts."""
    rng = random.Random(seed)

    def seconds(work: Work) -> float:
        prompt = first + 2e-5 * work.tokens + 1e-9 * work.pairs if work.tokens else 0.0
        return (5e-3 + row * work.rows + context * work.context + prompt) * rng.uniform(0.98, 1.02)

    chunks = Chunks(_limits(0.02, 1.75))
    for _ in range(users):
        length = rng.randrange(100, 8000)
        for begun in range(0, length, 1000):
            work = Work().with_chunk(begun, min(1000, length - begun))
            chunks.learn(work, seconds(work))
        for generated in range(rng.randrange(1, 4)):
            work = Work(1, length + generated)
            chunks.learn(work, seconds(work))
    for rows in range(0, 64, 4):
        work = Work(rows, 300 * rows)
        for _ in range(4):
            work = work.with_chunk(0, 250)
        chunks.learn(work, seconds(work))
    many = Work(64, 64 * 300)
    alone, with_any = seconds(many), seconds(many.with_chunk(0, 1))
    allowed = chunks.seconds(many, Sequence("a", [1] * 30_000, 10))
    assert allowed <= 1.2 * max(2 * 0.02, 1.75 * with_any, 2 * with_any - alone)


@given(
    seed=st.integers(0, 10**6),
    step=st.floats(1e-3, 8e-3),
    row=st.floats(0.0, 2e-4),
    token=st.floats(5e-6, 5e-5),
    pair=st.floats(0.0, 4e-9),
    free=st.integers(0, 150),
)
@settings(max_examples=40, deadline=None)
def test_no_history_of_loads_makes_steps_much_too_long(
    seed: int, step: float, row: float, token: float, pair: float, free: int
) -> None:
    """Loads of other shapes before tell the costs apart poorly, or not at all.

    Args:
        free: tokens that cost nothing, because the machine reads the weights in that time anyway.
    """
    rng = random.Random(seed)

    def seconds(work: Work) -> float:
        tokens = max(0, work.tokens + work.rows - free)
        return step + row * work.rows + 2e-8 * work.context + token * tokens + pair * work.pairs

    scheduler = Scheduler(replace(_limits(0.02, 1.75), max_rows=64, max_step_tokens=8192))
    capacities, number = (NO_CAPACITY,), 0
    for _ in range(4):
        prompts = rng.choice([(100, 101), (200, 2000), (20, 60), (16_000, 16_001)])
        for _ in range(rng.choice([1, 2, 60]) if prompts[0] < 16_000 else 1):
            number += 1
            output = rng.randrange(20, 60)
            scheduler.add(Sequence(str(number), [1] * rng.randrange(*prompts), output))
        in_flight: list[Sequence] = []
        while not scheduler.idle or in_flight:
            plan = scheduler.plan(capacities)
            scheduler.commit(plan)
            capacities, work = plan.capacities, plan.work
            if plan.decode:
                alone = seconds(work._replace(tokens=0, pairs=0, prompts=0))
                # The least chunk of a prompt is computed however long it takes.
                least = seconds(work._replace(tokens=MIN_CHUNK, pairs=MIN_CHUNK * 20_000))
                allowed = max(2 * 0.02, 1.75 * alone, alone + 2 * token * free, least)
                assert seconds(work) <= 1.6 * allowed
            scheduler.learn(work, seconds(work) * rng.uniform(0.97, 1.03))
            for sequence in in_flight:
                scheduler.read(sequence, [7])
                if len(sequence.tokens) == sequence.max_total_tokens:
                    scheduler.finish(sequence)
            in_flight = [*plan.decode, *plan.joins]


@given(prompt=st.integers(2_000, 120_000), per_token=st.floats(5e-6, 5e-5), rows=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_a_long_prompt_takes_steps_of_up_to_twice_the_time(
    prompt: int, per_token: float, rows: int
) -> None:
    """As many as share it evenly; a short one leaves steps as they are."""

    def seconds(work: Work) -> float:
        return 5e-3 + 1e-4 * work.rows + per_token * work.tokens + 3e-10 * work.pairs

    limits = replace(_limits(0.02, 1.75), max_step_tokens=4096, kv_bytes=10**12)
    chunks = Chunks(limits)
    rng = random.Random(prompt)
    for _ in range(200):
        work = Work(rows, rows * rng.randrange(100, 900))
        chunks.learn(work, seconds(work))
        work = work.with_chunk(rng.randrange(30_000), rng.randrange(1, 900))
        chunks.learn(work, seconds(work))
    sequence = Sequence("a", [1] * prompt, 10)
    alone = Work(rows, rows * 500)
    allowed = chunks.seconds(alone, sequence)
    needed = seconds(alone.with_chunk(0, prompt)) - seconds(alone)
    expected = seconds(alone) + needed / LONG_PROMPT_STEPS
    least = max(0.02, 1.75 * seconds(alone))
    assert allowed == pytest.approx(max(least, min(expected, 0.04)), rel=0.05)
    assert Chunks(replace(limits, max_step_stretch=0.0)).seconds(alone, sequence) == 0.02


def test_a_prompt_makes_progress_however_slow_steps_are() -> None:
    steps = _served(_limits(1e-6, 0.0), machine(1.0))
    assert {work.tokens for work, _ in steps[5:] if work.tokens} <= set(range(1, MIN_CHUNK + 1))
    assert any(work.tokens == MIN_CHUNK for work, _ in steps)


def test_no_prompt_is_left_with_a_short_rest_that_costs_another_chunk() -> None:
    limits = replace(_limits(0.02, 0.0), chunk_multiple=128)

    def rests(avoid_partial_prefill: bool) -> list[int]:
        """Tokens of each prompt that are left after a chunk."""
        left: list[int] = []

        def on_plan(plan: Plan) -> None:
            for sequence, tokens in plan.chunks.items():
                left.append(
                    sequence.num_tokens - plan.cached.get(sequence, sequence.computed) - tokens
                )

        _served(replace(limits, avoid_partial_prefill=avoid_partial_prefill), machine(1.0), on_plan)
        return [rest for rest in left if rest]

    assert min(rests(avoid_partial_prefill=False)) < 128
    assert min(rests(avoid_partial_prefill=True)) >= 128
