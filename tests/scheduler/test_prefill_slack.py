"""Short prompts overtake long ones within a bound, and long ones do not starve."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.scheduler.loop import EngineLoop, make_limits, make_sequence

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.simulate.machine import StepCost
from chairlift.scheduler.simulate.measurements import Served
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceRequest

# A prompt token takes 10 ms, and nothing else takes time.
TOKENS_ONLY = StepCost(step=0.0, row=0.0, context=0.0, token=0.01, pair=0.0)
LIMITS = Limits(8, 64, 20_000_000, KVGeometry(100, {32: 50}))


def _teach(scheduler: Scheduler) -> None:
    """Lets a scheduler learn that a prompt token takes 10 ms."""
    for tokens in (16, 32, 48, 64, 64, 64):
        work = Work().with_chunk(0, tokens)
        scheduler.learn(work, TOKENS_ONLY.seconds(work))


def _loop(slack: float) -> EngineLoop:
    loop = EngineLoop(replace(make_limits(rows=8, tokens=40), prefill_slack=slack))
    _teach(loop.scheduler)
    return loop


@pytest.mark.parametrize("slack", [0.0, 1.0, 4.0])
def test_a_short_prompt_overtakes_a_long_one_that_is_being_computed(slack: float) -> None:
    """Its 200 tokens take 2 s; prompts that come within this time, times the slack, go first."""
    loop = _loop(slack)
    loop.scheduler.add(make_sequence("long", 200))
    loop.step()
    loop.scheduler.add(make_sequence("soon", 10, arrival=slack * 1.8))
    loop.scheduler.add(make_sequence("late", 10, arrival=slack * 2.0 + 0.1))
    order = [s.request_id for s in loop.step().joins]
    assert loop.scheduler.sequences_of("long")[0].computed > 40, "it gets the rest of each step"
    while not loop.scheduler.idle:
        order += [s.request_id for s in loop.step().joins]
    assert order == (["soon", "long", "late"] if slack else ["long", "soon", "late"])


def test_among_prompts_that_wait_the_long_one_gives_way_within_its_slack() -> None:
    loop = EngineLoop(replace(make_limits(rows=1, tokens=40), prefill_slack=4.0))
    _teach(loop.scheduler)
    loop.scheduler.add(make_sequence("first", 4))
    loop.step()
    loop.scheduler.add(make_sequence("long", 100, arrival=1.0))
    for name, arrival in (("within", 4.0), ("beyond", 5.0)):
        loop.scheduler.add(make_sequence(name, 4, arrival=arrival))
    loop.drain()
    assert [s.request_id for s in loop.finished] == ["first", "within", "long", "beyond"]


@pytest.mark.parametrize("cached", [0, 190])
def test_a_prompt_is_as_long_as_its_part_that_is_not_cached(cached: int) -> None:
    scheduler = Scheduler(
        replace(make_limits(rows=8, tokens=40), prefill_slack=4.0),
        lambda sequence: cached if sequence.request_id == "chat" else 0,
    )
    _teach(scheduler)
    scheduler.add(Sequence("chat", list(range(200)), 5, arrival=1.0))
    scheduler.add(Sequence("new", list(range(500, 520)), 5, arrival=2.0))
    first = next(iter(scheduler.plan([NO_CAPACITY]).cached))
    assert first.request_id == ("chat" if cached else "new")


def test_a_preempted_row_has_no_slack() -> None:
    """Others have overtaken it before its first token; afterwards it goes first."""
    loop = EngineLoop(replace(make_limits(kv=60_000), prefill_slack=1000.0))
    _teach(loop.scheduler)
    for name, arrival in (("old", 0.0), ("middle", 1.0), ("young", 2.0)):
        loop.scheduler.add(make_sequence(name, 60, outputs=170, arrival=arrival))
    preempted: list[Sequence] = []
    while not preempted:
        preempted = loop.step().preempted
    assert all(sequence.generated for sequence in preempted)
    loop.scheduler.waiting.unblock_ready()
    assert set(preempted) <= set(loop.scheduler.waiting.ready)
    assert {sequence.slack for sequence in preempted} == {0.0}


def _served(slack: float, seed: int, rate: float) -> list[Served]:
    """Short prompts and a few long ones that arrive at random."""
    rng = random.Random(seed)
    simulation = Simulation(replace(LIMITS, prefill_slack=slack), TOKENS_ONLY)
    _teach(simulation.scheduler)
    requests, clock = [], 0.0
    for _ in range(200):
        clock += rng.expovariate(rate)
        prompt = rng.randrange(300, 900) if rng.random() < 0.1 else rng.randrange(1, 30)
        requests.append(TraceRequest(clock, prompt, 2, 2))
    for _ in simulation.run(requests):
        pass
    return simulation.measurements.served


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slack", [0.0, 2.0, 4.0])
@pytest.mark.parametrize("rate", [0.6, 3.0], ids=["busy", "overloaded"])
def test_nobody_is_overtaken_by_requests_that_come_after_its_slack(
    slack: float, seed: int, rate: float
) -> None:
    served = _served(slack, seed, rate)
    assert len(served) == 200
    first_tokens = {request: request.arrival + request.ttft for request in served}
    overtaken = [
        (other.arrival - request.arrival) / (0.01 * request.prompt_tokens)
        for request in served
        for other in served
        if other.arrival > request.arrival and first_tokens[other] < first_tokens[request] - 1e-9
    ]
    assert max(overtaken, default=0.0) <= slack + 0.05
    assert bool(overtaken) == bool(slack)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_short_prompts_hardly_wait_for_long_ones(seed: int) -> None:
    def mean_ttft(slack: float, long: bool) -> float:
        times = [r.ttft for r in _served(slack, seed, 0.6) if (r.prompt_tokens > 100) == long]
        return sum(times) / len(times)

    assert mean_ttft(4.0, long=False) < 0.6 * mean_ttft(0.0, long=False)
    assert mean_ttft(4.0, long=True) < 1.3 * mean_ttft(0.0, long=True)
