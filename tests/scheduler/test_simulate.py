"""The simulated scheduler: no request starves, no limit is broken, and decisions stay cheap."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from chairlift.cache.capacity import KVGeometry
from chairlift.loadtest.engine_bench.load import AnyLengths, Load, Range
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.simulate.machine import MACHINES, StepCost, factors
from chairlift.scheduler.simulate.measurements import Measurements, Served
from chairlift.scheduler.simulate.report import figures, text
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceRequest
from chairlift.scheduler.simulate.traffic import Lengths, Traffic

LIMITS = Limits(8, 64, 2_000_000, KVGeometry(100, {32: 50}))
# Every step takes one second.
ONE_SECOND = StepCost(step=1.0, row=0.0, context=0.0, token=0.0, pair=0.0)
COST = StepCost(step=5e-3, row=5e-4, context=1e-7, token=1e-4, pair=1e-8)
SHORT = Traffic(400, rate=20.0, prompts=Lengths(40, 1.0, 300), outputs=Lengths(30, 1.0, 200))


def _simulate(simulation: Simulation, requests: list[TraceRequest]) -> Simulation:
    ended = sum(simulation.run(requests))
    assert ended == len(requests)
    return simulation


def test_times_follow_from_planning_one_step_ahead() -> None:
    requests = [TraceRequest(0.5, 4, 3, 3, "a"), TraceRequest(0.6, 4, 1, 1, "b")]
    simulation = _simulate(Simulation(LIMITS, ONE_SECOND), requests)
    first, second = simulation.measurements.served
    assert (first.queue, first.ttft, first.total) == (0.0, 1.0, 3.0)
    assert first.alone == 3.0
    # The step that begins at 1.5 was planned at 0.5, the next one at 1.5, and begins at 2.5.
    assert (second.queue, second.ttft, second.total) == pytest.approx((0.9, 2.9, 2.9))
    report = figures(simulation.measurements, simulation.budget)
    assert report["gap"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert report["seconds"] == 3.5
    # Rows of 5 and 6 tokens in 64 columns, then in 128 when the other prompt is admitted.
    assert report["padding_ratio"] == 1 - (5 + 6) / (64 + 128)


def test_an_early_end_costs_one_step_whose_token_is_discarded() -> None:
    simulation = _simulate(Simulation(LIMITS, ONE_SECOND), [TraceRequest(0.0, 4, 3, 100)])
    (served,) = simulation.measurements.served
    assert (served.output_tokens, served.total) == (3, 3.0)
    assert simulation.clock == 4.0, "the fourth step was launched before the third was read"
    assert sum(simulation.measurements.gaps.values()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        replace(LIMITS, kv_bytes=100_000),
        replace(LIMITS, step_seconds=0.01, chunk_multiple=8),
        replace(LIMITS, geometry=KVGeometry(100, row_bytes=3000), checkpoint=16),
        replace(LIMITS, paged=True),
        replace(LIMITS, paged=True, kv_bytes=150_000),
    ],
    ids=["plenty", "little memory", "paced", "recurrent", "pages", "few pages"],
)
def test_every_simulated_request_is_served_within_the_limits(limits: Limits) -> None:
    traffic = replace(SHORT, requests=100, rate=60.0, outputs=Lengths(150, 0.3, 250))
    requests = list(traffic.draw())
    simulation = _simulate(Simulation(limits, COST, factors(0.3, 1)), requests)
    served, budget = simulation.measurements.served, simulation.budget
    fitting = [r for r in requests if r.prompt_tokens + r.max_tokens <= limits.max_context]
    assert len(served) == len(fitting) == len(requests) - simulation.measurements.refused
    expected = sum(request.output_tokens for request in fitting)
    assert sum(request.output_tokens for request in served) == expected
    assert sum(simulation.measurements.gaps.values()) == expected - len(served)
    assert 0.5 * limits.max_rows < budget.rows <= limits.max_rows
    assert 0.5 * limits.max_step_tokens < budget.step_tokens <= limits.max_step_tokens
    assert 0 < budget.kv_bytes <= limits.kv_bytes
    preempted = figures(simulation.measurements, budget)["preemptions"]
    assert (preempted > 0) == (limits.kv_bytes < 200_000)


@pytest.mark.parametrize("paged", [False, True], ids=["columns", "pages"])
@pytest.mark.parametrize(
    "looser", [{"max_rows": 20}, {"max_step_tokens": 100}, {"kv_bytes": 4_000_000}]
)
def test_a_scheduler_that_breaks_a_limit_is_detected(looser: dict[str, int], paged: bool) -> None:
    limits = replace(LIMITS, kv_bytes=200_000, paged=paged)
    simulation = Simulation(limits, COST)
    simulation.scheduler = Scheduler(replace(limits, **looser))  # type: ignore[arg-type]
    requests = replace(SHORT, rate=1000.0).draw()
    with pytest.raises(AssertionError, match="Limits"):
        list(simulation.run(requests))


def _overtaken_by(ageing: float) -> float:
    """Most seconds that a request arrived after one of the lowest class and still began before it.

    Urgent requests arrive three times as fast as they can be served.
    """
    traffic = replace(SHORT, requests=600, rate=60.0, priorities={0: 0.9, 1: 0.05, 3: 0.05})
    simulation = Simulation(replace(LIMITS, ageing=ageing, prefill_slack=0.0), COST)
    served = _simulate(simulation, list(traffic.draw())).measurements.served
    began = {request: request.arrival + request.queue for request in served}
    return max(
        other.arrival - lowest.arrival
        for lowest in served
        if lowest.priority == 3
        for other in served
        if began[other] < began[lowest] - 1e-9
    )


@pytest.mark.slow
def test_no_simulated_request_starves_under_constant_urgent_load() -> None:
    assert 2.5 < _overtaken_by(ageing=1.0) <= 3.0, "three classes below, a second each"
    assert _overtaken_by(ageing=1000.0) > 8.0, (
        "without ageing, urgent requests of ten seconds overtake it"
    )


class _ComparedInPython(Sequence):
    """A sequence whose comparisons run Python code, so that they are counted."""

    __slots__ = ()
    __hash__ = Sequence.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _instructions(work: Callable[[], Any]) -> int:
    """Python instructions that a call takes: a measure of time without noise."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _decision_cost(waiting: int) -> tuple[int, int]:
    """Instructions and bytes that planning and committing a step takes with this many waiting."""
    scheduler = Scheduler(LIMITS)

    def add(number: int) -> _ComparedInPython:
        sequence = _ComparedInPython(
            str(number), [1, 2, 3], 5, arrival=float(number), priority=number % 3
        )
        scheduler.add(sequence)
        return sequence

    queued = [add(number) for number in range(waiting)]
    capacities = (NO_CAPACITY,)
    for _ in range(3):
        plan = scheduler.plan(capacities)
        scheduler.commit(plan)
        capacities = plan.capacities
        for sequence in plan.joins:
            scheduler.read(sequence, [7])
    for sequence in list(scheduler.running)[:3]:
        scheduler.finish(sequence)

    def decide() -> None:
        scheduler.finish(queued[waiting // 2])
        add(waiting)
        scheduler.commit(scheduler.plan(capacities))

    tracemalloc.start()
    try:
        count = _instructions(decide)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(scheduler.waiting) > 0.8 * waiting
    return count, peak


@pytest.mark.slow
def test_the_cost_of_a_decision_does_not_grow_with_the_queue() -> None:
    (short, short_bytes), (long, long_bytes) = _decision_cost(100), _decision_cost(100_000)
    assert short > 1000
    assert long < 1.1 * short, "instructions"
    assert long_bytes < short_bytes + 100_000, "a copy of the queue's references is 800,000"


def test_the_figures_follow_their_definitions() -> None:
    measurements = Measurements(seconds=120.0)
    for number in range(1, 101):
        user, total = ("quick", 1.0) if number % 2 else ("slow", 3.0)
        served = Served(user, number % 2, number, 10, 0.0, number / 10, number / 5, total, 1.0)
        measurements.served.append(served)
    report = figures(measurements, Simulation(LIMITS, COST).budget)
    all_requests, *groups = report["groups"]
    assert all_requests["queue"] == {"p50": 5.0, "p90": 9.0, "p99": 9.9, "max": 10.0}
    assert [group["name"] for group in groups] == [
        *("priority 0", "priority 1"),
        *("prompts 1/4, to 25", "prompts 2/4, to 50", "prompts 3/4, to 75", "prompts 4/4, to 100"),
    ]
    assert [group["requests"] for group in groups] == [50, 50, 25, 25, 25, 25]
    assert groups[0]["slowdown"]["p50"] == 3.0
    assert groups[1]["slowdown"]["max"] == 1.0
    # Speeds of 1 and 1/3: (4/3)² / (2 · (1 + 1/9)).
    assert report["jain_index"] == pytest.approx(0.8)
    assert report["output_tokens_per_s"] == pytest.approx(1000 / 120)
    assert "Jain's index 0.8000 over 2 users" in text(report)


def test_traffic_has_the_requested_rates_and_lengths() -> None:
    traffic = Traffic(4000, rate=5.0, users=3, priorities={-1: 1, 2: 3})
    requests = list(traffic.draw())
    assert requests == list(traffic.draw())
    assert requests != list(replace(traffic, seed=1).draw())
    assert requests[-1].arrival == pytest.approx(4000 / 5, rel=0.1)
    prompts = sorted(request.prompt_tokens for request in requests)
    assert prompts[2000] == pytest.approx(300, rel=0.1)
    assert prompts[3360] == pytest.approx(300 * 2.72, rel=0.15)
    assert all(r.output_tokens <= r.max_tokens < 2 * r.output_tokens for r in requests)
    share = sum(request.priority == -1 for request in requests) / 4000
    assert share == pytest.approx(0.25, abs=0.03)
    first = sum(request.user == "user-0" for request in requests) / 4000
    assert first == pytest.approx(6 / 11, abs=0.03)

    def deviation(burstiness: float) -> float:
        times = [r.arrival for r in replace(traffic, burstiness=burstiness).draw()]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return (sum((gap - 0.2) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert deviation(1.0) == pytest.approx(0.2, rel=0.1)
    assert deviation(0.25) == pytest.approx(0.4, rel=0.15)


@pytest.mark.parametrize(
    ("prompts", "outputs", "measured"),
    [
        (Lengths(350, 0.9, 4096), Lengths(180, 0.6, 768), 5400),
        (Range(256, 768), Range(128, 384), 7850),
    ],
    ids=["log-normal", "uniform"],
)
def test_the_gpu_takes_as_long_as_measured(
    prompts: AnyLengths, outputs: AnyLengths, measured: float
) -> None:
    """Within 15 %; ``measured`` are tokens a second of docs/explanation/performance.md."""
    load = Load(256, prompts, outputs)
    requests = [
        TraceRequest(0.0, len(request.prompt), request.output, request.output)
        for _, request in load.draw(151_936)
    ]
    machine = MACHINES["h200-qwen3-8b"]
    simulation = _simulate(Simulation(machine.limits, machine.cost), requests)
    rate = sum(request.output_tokens for request in requests) / simulation.clock
    assert rate == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_the_machines_keep_within_their_own_limits() -> None:
    for machine in MACHINES.values():
        requests = list(Traffic(60, rate=1000.0).draw())
        simulation = _simulate(Simulation(machine.limits, machine.cost), requests)
        assert len(simulation.measurements.served) == 60
