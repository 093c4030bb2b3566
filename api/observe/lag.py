"""Measures the event loop's lag. While the loop is blocked, no stream makes progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import suppress

from aiohttp import web

from chairlift.metrics.recorder import Recorder

# While requests run, and while none does: each measurement wakes the process.
INTERVAL_SECONDS = 0.1
IDLE_SECONDS = 1.0


def lag_recording(
    recorder: Recorder, running: Sized
) -> Callable[[web.Application], AsyncIterator[None]]:
    """A cleanup context that records the event loop's lag while the application runs.

    Args:
        running: the running requests.
    """

    async def record(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_watch(recorder, running))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return record


async def _watch(recorder: Recorder, running: Sized) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        interval = INTERVAL_SECONDS if len(running) else IDLE_SECONDS
        expected = clock() + interval
        await asyncio.sleep(interval)
        recorder.record_lag(max(0.0, clock() - expected))
