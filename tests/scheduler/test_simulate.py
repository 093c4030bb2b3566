"""The scheduler simulated: nobody starves, no limit is broken, no decision gets dear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import NO_CAPACITY, Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.simulate.__main__ import main
from chairlift.scheduler.simulate.machine import MACHINES, StepCost, factors
from chairlift.scheduler.simulate.measurements import Measurements, Served
from chairlift.scheduler.simulate.report import figures, text
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceError, TraceRequest, read_trace
from chairlift.scheduler.simulate.traffic import Lengths, Traffic

LIMITS = Limits(8, 64, 2_000_000, KVGeometry(100, {32: 50}))
# A step takes a second, whatever it computes.
SECONDS = StepCost(step=1.0, row=0.0, context=0.0, token=0.0, pair=0.0)
COST = StepCost(step=5e-3, row=5e-4, context=1e-7, token=1e-4, pair=1e-8)
SHORT = Traffic(400, rate=20.0, prompts=Lengths(40, 1.0, 300), outputs=Lengths(30, 1.0, 200))


def _simulated(simulation: Simulation, requests: list[TraceRequest]) -> Simulation:
    ended = sum(simulation.run(requests))
    assert ended == len(requests)
    return simulation


def test_times_are_those_of_steps_planned_one_ahead() -> None:
    requests = [TraceRequest(0.5, 4, 3, 3, "a"), TraceRequest(0.6, 4, 1, 1, "b")]
    simulation = _simulated(Simulation(LIMITS, SECONDS), requests)
    first, second = simulation.measurements.served
    assert (first.queue, first.ttft, first.total) == (0.0, 1.0, 3.0)
    assert first.alone == 3.0
    # The step that begins at 1.5 was planned at 0.5, the next one at 1.5, and begins at 2.5.
    assert (second.queue, second.ttft, second.total) == pytest.approx((0.9, 2.9, 2.9))
    report = figures(simulation.measurements, simulation.budget)
    assert report["gap"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert report["seconds"] == 3.5
    # Rows of 5 and 6 in 64 columns, and in 128 as the other prompt is let in.
    assert report["padding_ratio"] == 1 - (5 + 6) / (64 + 128)


def test_a_model_that_ends_before_it_must_costs_a_step_that_nobody_reads() -> None:
    simulation = _simulated(Simulation(LIMITS, SECONDS), [TraceRequest(0.0, 4, 3, 100)])
    (served,) = simulation.measurements.served
    assert (served.output_tokens, served.total) == (3, 3.0)
    assert simulation.clock == 4.0, "the fourth step was launched before the third was read"
    assert sum(simulation.measurements.gaps.values()) == 2


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        replace(LIMITS, kv_bytes=100_000),
        replace(LIMITS, step_seconds=0.01, chunk_multiple=8),
        replace(LIMITS, geometry=KVGeometry(100, row_bytes=3000), checkpoint=16),
    ],
    ids=["plenty", "little memory", "paced", "recurrent"],
)
def test_everyone_is_served_within_the_limits(limits: Limits) -> None:
    traffic = replace(SHORT, requests=150, rate=60.0, outputs=Lengths(150, 0.3, 250))
    requests = list(traffic.draw())
    simulation = _simulated(Simulation(limits, COST, factors(0.3, 1)), requests)
    served, budget = simulation.measurements.served, simulation.budget
    fitting = [r for r in requests if r.prompt_tokens + r.max_tokens <= limits.max_context]
    assert len(served) == len(fitting) == len(requests) - simulation.measurements.refused
    asked = sum(request.output_tokens for request in fitting)
    assert sum(request.output_tokens for request in served) == asked
    assert sum(simulation.measurements.gaps.values()) == asked - len(served)
    assert 0.5 * limits.max_rows < budget.rows <= limits.max_rows
    assert 0.5 * limits.max_step_tokens < budget.step_tokens <= limits.max_step_tokens
    assert 0 < budget.kv_bytes <= limits.kv_bytes
    preempted = figures(simulation.measurements, budget)["preemptions"]
    assert (preempted > 0) == (limits.kv_bytes == 100_000)


@pytest.mark.parametrize(
    "looser", [{"max_rows": 20}, {"max_step_tokens": 100}, {"kv_bytes": 4_000_000}]
)
def test_a_scheduler_that_goes_beyond_a_limit_is_caught(looser: dict[str, int]) -> None:
    limits = replace(LIMITS, kv_bytes=200_000)
    simulation = Simulation(limits, COST)
    simulation.scheduler = Scheduler(replace(limits, **looser))  # type: ignore[arg-type]
    requests = replace(SHORT, rate=1000.0).draw()
    with pytest.raises(AssertionError, match="Limits"):
        list(simulation.run(requests))


def _overtaken_by(ageing: float) -> float:
    """How long after one of the lowest class somebody may come and still begin before it (s).

    Urgent requests come three times as fast as they can be served.
    """
    traffic = replace(SHORT, requests=600, rate=60.0, priorities={0: 0.9, 1: 0.05, 3: 0.05})
    simulation = Simulation(replace(LIMITS, ageing=ageing), COST)
    served = _simulated(simulation, list(traffic.draw())).measurements.served
    begun = {request: request.arrival + request.queue for request in served}
    return max(
        other.arrival - lowest.arrival
        for lowest in served
        if lowest.priority == 3
        for other in served
        if begun[other] < begun[lowest] - 1e-9
    )


def test_nobody_starves_under_constant_urgent_load() -> None:
    assert 2.5 < _overtaken_by(ageing=1.0) <= 3.0, "three classes below, a second each"
    assert _overtaken_by(ageing=1000.0) > 8.0, "nobody ages, and all ten seconds' urgent ones pass"


class Counted(Sequence):
    """A sequence that every comparison with another one calls."""

    __slots__ = ()
    __hash__ = Sequence.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _instructions(work: Callable[[], Any]) -> int:
    """Python instructions that a call takes: what a clock would tell, but always the same."""
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


def _decision(waiting: int) -> tuple[int, int]:
    """Instructions and bytes that it takes to plan and launch a step while so many wait."""
    scheduler = Scheduler(LIMITS)

    def add(number: int) -> Counted:
        sequence = Counted(str(number), [1, 2, 3], 5, arrival=float(number), priority=number % 3)
        scheduler.add(sequence)
        return sequence

    queued = [add(number) for number in range(waiting)]
    capacities = (NO_CAPACITY,)
    for _ in range(3):
        plan = scheduler.plan(capacities)
        scheduler.commit(plan)
        capacities = plan.capacities
        for sequence in plan.joins:
            scheduler.token(sequence, 7)
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


def test_what_a_decision_costs_does_not_grow_with_the_queue() -> None:
    (few, few_bytes), (many, many_bytes) = _decision(100), _decision(100_000)
    assert few > 1000
    assert many < 1.1 * few, "instructions"
    assert many_bytes < few_bytes + 100_000, "a copy of the queue's references is 800,000"


def test_the_figures_are_those_of_the_definitions() -> None:
    measurements = Measurements(seconds=120.0)
    for number in range(1, 101):
        user, total = ("quick", 1.0) if number % 2 else ("slow", 3.0)
        served = Served(user, number % 2, number, 10, 0.0, number / 10, number / 5, total, 1.0)
        measurements.served.append(served)
    report = figures(measurements, Simulation(LIMITS, COST).budget)
    everyone, *groups = report["groups"]
    assert everyone["queue"] == {"p50": 5.0, "p90": 9.0, "p99": 9.9, "max": 10.0}
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


def test_traffic_is_what_was_asked_for() -> None:
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
    ("name", "content"),
    [
        (
            "ours.jsonl",
            '{"arrival": 7, "prompt_tokens": 10, "output_tokens": 2}\n\n'
            '{"arrival": 8.5, "prompt_tokens": 20, "output_tokens": 1}\n',
        ),
        ("ours.csv", "arrival,prompt_tokens,output_tokens\n7,10,2\n8.5,20,1\n"),
        (
            "mooncake.jsonl",
            '{"timestamp": 27000, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
            '{"timestamp": 28500, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}\n',
        ),
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
            "2023-11-16 18:17:03.9799600,10,2\r\n2023-11-16 18:17:05.4799600,20,1\r\n",
        ),
        (
            "azure2024.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-10 00:00:01.509930+00:00,20,1\n",
        ),
    ],
)
def test_traces_of_each_format_are_read(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 10, 2, 2)
    assert second._replace(arrival=0.0) == TraceRequest(0.0, 20, 1, 1)
    assert second.arrival == pytest.approx(1.5)
    assert main(["--trace", str(path), "--machine", "cpu-smollm2-135m"]) == 0
    assert "2 served" in capsys.readouterr().out


def test_a_trace_of_our_own_tells_users_priorities_and_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"arrival": 0, "prompt_tokens": 10, "output_tokens": 2}
    more = {"max_tokens": 9, "user": "ann", "priority": -2}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row | more)}\n")
    assert list(read_trace(path)) == [
        TraceRequest(0.0, 10, 2, 2),
        TraceRequest(0.0, 10, 2, 9, "ann", -2),
    ]


GOOD = '{"arrival": 7, "prompt_tokens": 10, "output_tokens": 2}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "{7}\n", "line 2: not JSON"),
        (GOOD + "7\n", "line 2: not a JSON object"),
        (GOOD + '{"prompt_tokens": 10}\n', "line 2: no column of arrivals"),
        (GOOD + GOOD.replace("7", "6"), "line 2: arrives before"),
        (GOOD.replace("7", '"soon"'), "line 1: arrival must be a time, not 'soon'"),
        (GOOD.replace("7", "NaN"), "line 1: arrival must be a time, not nan"),
        (GOOD.replace("10", "0"), "line 1: prompt_tokens must be a whole number above 0, not 0"),
        (GOOD.replace("10", "1.5"), "line 1: prompt_tokens must be a whole number"),
        (GOOD.replace("2}", '2, "max_tokens": 1}'), "line 1: output of 2 tokens, but max_tokens"),
        (GOOD.replace("2}", '2, "priority": "high"}'), "line 1: priority must be a whole number"),
        ("arrival,prompt_tokens\n1,2\n", "line 2: no output_tokens"),
        ("arrival,prompt_tokens,output_tokens\n1,2,3\n2,x,3\n", "line 3: prompt_tokens must be"),
        ('arrival,prompt_tokens,output_tokens\n1,"2\n', "line 2: no output_tokens"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        list(read_trace(path))
    assert main(["--trace", str(path)]) == 2
    assert f"simulate: {path}, {message[:6]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-rows 0", "max-rows"),
        ("--max-step-tokens 10", "max-step-tokens"),
        ("--kv-bytes 1e6", "kv-memory"),
        ("--rate 0", "rate must be above 0"),
        ("--noise 1", "noise must be"),
        ("--priorities 0:-1", "shares of priorities"),
        ("--trace /nowhere", "/nowhere"),
        ("--trace /nowhere --requests 0", "requests must be above 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 2
    assert message in capsys.readouterr().err


def _run(seed: int, folder: Path, hashes: str) -> tuple[bytes, bytes]:
    """What the command prints and writes, in a process that must do without MLX."""
    out = folder / f"{seed}-{hashes}.json"
    script = (
        "import sys; from chairlift.scheduler.simulate.__main__ import main; assert main() == 0;"
        "assert not any(name.startswith('mlx') for name in sys.modules)"
    )
    flags = ["--requests", "150", "--rate", "12", "--seed", str(seed), "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags],
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": hashes},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, out.read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_needs_no_mlx(tmp_path: Path) -> None:
    once, again, other = _run(3, tmp_path, "1"), _run(3, tmp_path, "2"), _run(4, tmp_path, "1")
    assert once == again
    assert once != other
    printed, written = once
    assert b"150 served" in printed
    assert json.loads(written)["finished"] == 150


def test_machines_are_within_their_own_limits() -> None:
    for machine in MACHINES.values():
        requests = list(Traffic(60, rate=1000.0).draw())
        simulation = _simulated(Simulation(machine.limits, machine.cost), requests)
        assert len(simulation.measurements.served) == 60
