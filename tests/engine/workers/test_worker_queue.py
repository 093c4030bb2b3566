"""The queue of jobs is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support import worker_jobs as jobs

from chairlift.engine.errors import QueueFull
from chairlift.engine.workers import pool
from chairlift.engine.workers.job import Job, TooExpensive, WorkerFailed
from chairlift.engine.workers.pool import CLIENT, MAX_WAITING, MAX_WAITING_OF_ONE, Workers


async def test_the_queue_is_bounded_for_each_client_and_in_total() -> None:
    outcomes: list[str] = []
    workers = Workers(jobs.MODULES, processes=1, record=outcomes.append)
    tasks: list[asyncio.Task[Any]] = []

    async def fill(client: str, count: int) -> None:
        CLIENT.set(client)
        tasks.extend(asyncio.create_task(workers.run(Job(jobs.wait, (60,)))) for _ in range(count))
        await asyncio.sleep(0.01)

    try:
        await fill("first", MAX_WAITING_OF_ONE + 2)
        CLIENT.set("first")
        with pytest.raises(QueueFull):
            await workers.run(Job(jobs.identity, (1,)))
        for number in range(MAX_WAITING // MAX_WAITING_OF_ONE):
            await fill(str(number), MAX_WAITING_OF_ONE)
        # The last client has no job yet; on a busy machine a few others may have ended by now.
        await fill("last", MAX_WAITING_OF_ONE)
        last = tasks[-MAX_WAITING_OF_ONE:]
        assert any(t.done() and isinstance(t.exception(), QueueFull) for t in last)
        assert "queue_full" in outcomes
    finally:
        workers.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, WorkerFailed | QueueFull | TooExpensive) for r in results)


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
async def test_jobs_that_wait_are_bounded_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(pool, "MAX_BYTES_OF_ONE", 5 * size)
    monkeypatch.setattr(pool, "MAX_BYTES", 12 * size)
    workers = Workers(jobs.MODULES, processes=1)
    tasks: list[asyncio.Task[Any]] = []

    async def refused(client: str, count: int) -> int:
        """How many more jobs of a client are refused."""
        CLIENT.set(client)
        jobs_of = [Job(jobs.wait_with, (60.0, [b"x" * size])) for _ in range(count)]
        own = [asyncio.create_task(workers.run(job)) for job in jobs_of]
        tasks.extend(own)
        await asyncio.sleep(0.01)
        return sum(task.done() and isinstance(task.exception(), QueueFull) for task in own)

    try:
        # The process takes one of them once it has started.
        assert await refused("first", 9) in (3, 4)
        assert await refused("second", 5) == 0
        assert await refused("third", 5) in (2, 3)
    finally:
        workers.close()
        await asyncio.gather(*tasks, return_exceptions=True)
