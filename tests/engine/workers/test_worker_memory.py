"""The memory that worker processes keep after jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support import worker_jobs as jobs
from support.paths import TESTS

from chairlift.engine.errors import GrammarError
from chairlift.engine.workers import pool
from chairlift.engine.workers.job import Fixture, Job, WorkerFailed
from chairlift.engine.workers.pool import Workers


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """A pool of one process."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setattr(pool, "WAIT_SECONDS", 180.0)
    workers = Workers((jobs.__name__,), processes=1)
    yield workers
    workers.close()


def _retain(megabytes: int) -> Job:
    # On a busy machine, half a gigabyte takes seconds.
    return Job(jobs.retain, (megabytes << 20,), cpu_seconds=60)


async def test_a_process_that_retains_much_memory_is_replaced(worker: Workers) -> None:
    first, second, third = [await worker.run(_retain(size)) for size in (1, 520, 1)]
    assert first == second != third


@pytest.mark.parametrize("function", [jobs.identity, jobs.bug])
async def test_a_new_fixture_hides_no_memory_that_jobs_retain(
    worker: Workers, function: object
) -> None:
    """Whether the fixture can be loaded or not."""
    args = (0,) if function is jobs.identity else ()
    processes = []
    for size in (200, 200, 200, 1):
        processes.append(await worker.run(_retain(size)))
        with suppress(WorkerFailed):
            await worker.run(Job(jobs.identity, (), fixture=Fixture(lambda: (function, args))))
    assert processes[0] == processes[1] == processes[2] != processes[3]


@pytest.mark.parametrize("kind", ["job", "fixture"])
async def test_errors_retain_no_memory(worker: Workers, kind: str) -> None:
    data = b"x" * (60 << 20)
    refused = Job(jobs.refuse_all, (data,), cpu_seconds=60)
    if kind == "fixture":
        refused = Job(jobs.identity, (), fixture=Fixture(lambda: (jobs.refuse_all, (data,))))
    process = await worker.run(Job(os.getpid, ()))
    for _ in range(12):
        with pytest.raises(GrammarError, match="bad"):
            await worker.run(refused)
    assert await worker.run(Job(os.getpid, ())) == process
