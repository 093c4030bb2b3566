"""Sends the requests of a run at their arrival times and collects the timed replies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.workload import WorkloadRequest

# Seconds that a client of ``run_loop`` waits after a failed request. Else those that a server
# refuses at once, as after its end, would be the more, the faster it refuses.
_FAILURE_PAUSE = 0.1


class LoadResult(NamedTuple):
    """The replies in the order of their requests, and the duration of the run in seconds."""

    replies: list[Reply]
    duration: float


class LoadInterrupted(asyncio.CancelledError):
    """The task was cancelled, as by Ctrl-C, while a load was sent.

    ``result`` has the replies that had ended.
    """

    def __init__(self, result: LoadResult) -> None:
        super().__init__()
        self.result = result


async def run_load(
    client: OpenAIClient,
    requests: Sequence[WorkloadRequest],
    offsets: Sequence[float],
    max_concurrency: int | None,
    progress: Progress,
) -> LoadResult:
    """Sends request i at ``offsets[i]`` seconds, or when fewer than ``max_concurrency`` run.

    Raises:
        LoadInterrupted: the task was cancelled.
    """
    slot = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    replies: dict[int, Reply] = {}

    async def send(number: int, due: float) -> None:
        async with slot:
            reply = await client.complete(requests[number], progress.add_chunk)
        # From when it was due, so that a client which is too slow for the load shows here.
        reply.queue_time = reply.start - due
        replies[number] = reply
        progress.add_reply(reply)

    async def send_all(group: asyncio.TaskGroup, start: float) -> None:
        for number, offset in zip(range(len(requests)), offsets, strict=True):
            due = start + offset
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(send(number, due))

    return await _timed(send_all, replies, progress)


async def run_loop(
    client: OpenAIClient,
    requests: Sequence[WorkloadRequest],
    concurrency: int,
    seconds: float,
    progress: Progress,
) -> LoadResult:
    """Keeps ``concurrency`` requests in flight for ``seconds``, then waits for the last ones.

    Requests are sent in order, and again from the first after the last. A client whose request
    failed waits for a moment.

    Raises:
        LoadInterrupted: the task was cancelled.
    """
    replies: dict[int, Reply] = {}
    numbers = itertools.count()

    async def send_until(end: float) -> None:
        while time.perf_counter() < end:
            number = next(numbers)
            reply = await client.complete(requests[number % len(requests)], progress.add_chunk)
            replies[number] = reply
            progress.add_reply(reply)
            if reply.error:
                await asyncio.sleep(_FAILURE_PAUSE)

    async def send_all(group: asyncio.TaskGroup, start: float) -> None:
        for _ in range(concurrency):
            group.create_task(send_until(start + seconds))

    return await _timed(send_all, replies, progress)


async def _timed(
    send_all: Callable[[asyncio.TaskGroup, float], Awaitable[None]],
    replies: dict[int, Reply],
    progress: Progress,
) -> LoadResult:
    """Runs ``send_all`` and the tasks that it starts, which fill ``replies``."""
    async with progress:
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                await send_all(group, start)
        except asyncio.CancelledError as error:
            duration = time.perf_counter() - start
            raise LoadInterrupted(LoadResult(_ordered(replies), duration)) from error
        duration = time.perf_counter() - start
    return LoadResult(_ordered(replies), duration)


def _ordered(replies: dict[int, Reply]) -> list[Reply]:
    return [replies[number] for number in sorted(replies)]
