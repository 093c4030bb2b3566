"""Worker processes: jobs, their limits in time and memory, and the order of clients."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import worker_jobs as jobs

from chairlift.engine.device.priority import MAX_NICENESS, NICENESS
from chairlift.engine.errors import GrammarError, RequestError
from chairlift.engine.workers import pool
from chairlift.engine.workers.job import MAX_FIXTURES, Fixture, Job, TooExpensive, WorkerFailed
from chairlift.engine.workers.pool import CLIENT, Workers
from chairlift.engine.workers.process import WorkerProcess
from chairlift.engine.workers.turns import Turns


async def test_a_job_returns_its_functions_value(workers: Workers) -> None:
    for value in (1, "text" * 1_000_000, {"a": [b"x"]}, None):
        assert await workers.run(Job(jobs.identity, (value,))) == value
    assert await workers.run(Job(jobs.print_much, ())) == "done"


@pytest.mark.slow
async def test_native_code_that_hangs_is_killed_at_its_time_limit(
    workers: Workers, outcomes: list[str]
) -> None:
    began = time.monotonic()
    # Of its CPU time, or in all if other processes use the cores.
    with pytest.raises(TooExpensive, match=r"takes longer than (0\.5|4) s"):
        await workers.run(Job(jobs.hang_in_native_code, (), cpu_seconds=0.5))
    assert time.monotonic() - began < 30  # 2^40 steps would take hours
    assert outcomes[-1] == "ended"
    assert await workers.run(Job(jobs.identity, (1,))) == 1
    assert outcomes[-1] == "done"


async def test_a_job_may_wait_for_the_cores_much_longer_than_its_cpu_time(workers: Workers) -> None:
    seconds = 0.25
    assert await workers.run(Job(jobs.wait, (4 * seconds,), cpu_seconds=seconds))
    with pytest.raises(TooExpensive, match=r"takes longer than 2 s: this machine is too busy"):
        await workers.run(Job(jobs.wait, (60.0,), cpu_seconds=seconds))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="macOS limits no memory")
@pytest.mark.parametrize("job", [Job(jobs.take_memory, (4 << 30,)), Job(jobs.die, ())])
async def test_a_job_that_kills_its_process_fails_alone(workers: Workers, job: Job) -> None:
    with pytest.raises(TooExpensive, match="memory or stack"):
        await workers.run(job)
    assert await workers.run(Job(jobs.identity, (1,))) == 1


@pytest.mark.slow
async def test_errors_keep_their_type_and_fields(workers: Workers, outcomes: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        await workers.run(Job(jobs.refuse, ("request",)))
    assert (str(caught.value), caught.value.param) == ("no", "field")
    with pytest.raises(GrammarError, match="bad"):
        await workers.run(Job(jobs.refuse, ("grammar",)))
    with pytest.raises(WorkerFailed, match="KeyError"):
        await workers.run(Job(jobs.bug, ()))
    assert outcomes[-1] == "refused"


@pytest.mark.slow
async def test_a_fixture_is_loaded_once_in_each_process(workers: Workers) -> None:
    loads: list[int] = []

    def make() -> tuple[Any, tuple[str]]:
        loads.append(1)
        return jobs.load_fixture, ("kept",)

    fixture = Fixture(make)
    for number in range(6):
        job = Job(jobs.with_fixture, (number,), fixture=fixture)
        assert await workers.run(job) == ("kept", True, number)
    assert 1 <= len(loads) <= 2
    with pytest.raises(TooExpensive):
        await workers.run(Job(jobs.hang_in_native_code, (), cpu_seconds=0.2))
    assert await workers.run(Job(jobs.with_fixture, (7,), fixture=fixture)) == ("kept", True, 7)


async def test_a_job_gets_its_own_fixture_and_a_process_keeps_those_used_last(
    workers: Workers,  # sets the path of the jobs
) -> None:
    """Each model of a server has its own tokenizer."""
    loads: list[int] = []

    def fixture(number: int) -> Fixture:
        def make() -> tuple[Any, tuple[int]]:
            loads.append(number)
            return jobs.identity, (number,)

        return Fixture(make)

    fixtures = [fixture(number) for number in range(MAX_FIXTURES + 1)]
    one = Workers(jobs.MODULES, processes=1)
    try:
        for number in (*range(MAX_FIXTURES), 0, MAX_FIXTURES, 0, 1):
            assert await one.run(Job(jobs.identity, (), fixture=fixtures[number])) == number
    finally:
        one.close()
    assert loads == [*range(MAX_FIXTURES + 1), 1]


async def test_a_fixture_that_gave_way_to_a_broken_one_is_loaded_again(workers: Workers) -> None:
    kept = Fixture(lambda: (jobs.identity, ("kept",)))
    others = [Fixture(lambda: (jobs.identity, (0,))) for _ in range(MAX_FIXTURES - 1)]
    one = Workers(jobs.MODULES, processes=1)
    try:
        for fixture in (kept, *others):
            await one.run(Job(jobs.identity, (), fixture=fixture))
        with pytest.raises(WorkerFailed, match="a bug"):
            await one.run(Job(jobs.identity, (), fixture=Fixture(lambda: (jobs.bug, ()))))
        assert await one.run(Job(jobs.identity, (), fixture=kept)) == "kept"
    finally:
        one.close()


async def test_a_client_with_many_jobs_does_not_delay_another() -> None:
    workers = Workers(jobs.MODULES, processes=1)
    try:
        CLIENT.set("greedy")
        greedy = [asyncio.create_task(workers.run(Job(jobs.wait, (0.05,)))) for _ in range(10)]
        await asyncio.sleep(0.01)
        CLIENT.set("other")
        other = await workers.run(Job(jobs.wait, (0.05,)))
        ended = sorted(await asyncio.gather(*greedy))
        assert sum(moment < other for moment in ended) <= 2
    finally:
        workers.close()


async def test_a_process_that_has_died_is_replaced_silently(workers: Workers) -> None:
    await workers.run(Job(jobs.identity, (1,)))
    for pid in workers.pids:
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    for _ in range(4):
        assert await workers.run(Job(jobs.identity, (1,))) == 1


async def test_closing_kills_busy_processes() -> None:
    workers = Workers(jobs.MODULES, processes=1)
    assert await workers.run(Job(jobs.identity, (1,))) == 1
    (pid,) = workers.pids
    running = asyncio.create_task(workers.run(Job(jobs.wait, (60,))))
    await asyncio.sleep(0.1)
    workers.close()
    with pytest.raises((TooExpensive, WorkerFailed)):
        await asyncio.wait_for(running, 180)
    with pytest.raises(WorkerFailed):
        await workers.run(Job(jobs.identity, (1,)))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_closing_with_cancelled_callers() -> None:
    workers = Workers(jobs.MODULES, processes=1)
    running = asyncio.create_task(workers.run(Job(jobs.wait, (60,))))
    waiting = [asyncio.create_task(workers.run(Job(jobs.identity, (1,)))) for _ in range(3)]
    await asyncio.sleep(0.1)
    waiting[1].cancel()
    await asyncio.sleep(0)
    workers.close()
    results = await asyncio.wait_for(asyncio.gather(running, *waiting, return_exceptions=True), 180)
    assert isinstance(results[2], asyncio.CancelledError)
    for result in (results[0], results[1], results[3]):
        assert isinstance(result, TooExpensive | WorkerFailed)


async def test_a_job_waits_for_a_process_that_is_starting() -> None:
    workers = Workers(jobs.MODULES, processes=2)
    workers.warm()
    assert await workers.run(Job(jobs.identity, (1,))) == 1
    assert len(workers.pids) == 1
    workers.close()


async def test_a_job_whose_process_failed_to_start_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, tries = WorkerProcess.start, iter([1, 2])

    def fails_late_once(process: WorkerProcess) -> bool:
        if next(tries, None) == 1:
            time.sleep(0.6)
            raise WorkerFailed("a worker process does not start")
        return start(process)

    monkeypatch.setattr(WorkerProcess, "start", fails_late_once)
    monkeypatch.setattr(pool, "WAIT_SECONDS", 0.5)
    workers = Workers(jobs.MODULES, processes=1)
    try:
        assert await workers.run(Job(jobs.identity, (1,))) == 1
    finally:
        workers.close()


async def test_jobs_are_done_after_the_system_had_no_process_left(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    start, fails = subprocess.Popen, iter([True, True])

    def popen(*arguments: Any, **options: Any) -> Any:
        if next(fails, False):
            raise BlockingIOError("Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    one = Workers(jobs.MODULES, processes=1)
    try:
        with pytest.raises(WorkerFailed, match="temporarily unavailable"):
            await asyncio.wait_for(one.run(Job(jobs.identity, (1,))), 180)
        assert await asyncio.wait_for(one.run(Job(jobs.identity, (2,))), 180) == 2
    finally:
        one.close()


async def test_jobs_are_done_after_the_system_had_no_thread_left(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    start, fails = threading.Thread.start, iter([True])

    def begin(thread: threading.Thread) -> None:
        if next(fails, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    one = Workers(jobs.MODULES, processes=1)
    try:
        with pytest.raises(RuntimeError, match="new thread"):
            await one.run(Job(jobs.identity, (1,)))
        assert await asyncio.wait_for(one.run(Job(jobs.identity, (2,))), 180) == 2
    finally:
        one.close()


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_clients_take_turns_and_keep_their_order(owners: list[str]) -> None:
    turns: Turns[tuple[str, int]] = Turns()
    for number, owner in enumerate(owners):
        turns.put(owner, (owner, number))
    taken = [turns.take() for _ in owners]
    assert len(turns) == 0
    for owner in "abc":
        entries = [entry for entry in taken if entry[0] == owner]
        assert entries == sorted(entries)
    left = {owner: owners.count(owner) for owner in set(owners)}
    last: dict[str, int] = {}
    for place, (owner, _) in enumerate(taken):
        # Between two entries of a client, every other waiting client has had one.
        between = {other for other, _ in taken[last.get(owner, place) : place]}
        if owner in last:
            assert between >= {other for other, count in left.items() if count}
        last[owner] = place
        left[owner] -= 1


async def test_a_worker_gives_way_to_the_engine(workers: Workers) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert await workers.run(Job(jobs.niceness, ())) == min(own + NICENESS, MAX_NICENESS)
