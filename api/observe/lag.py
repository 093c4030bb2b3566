"""Measures the event loop's lag. While the loop is blocked, no stream makes progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web

from chairlift.metrics.recorder import Recorder

INTERVAL_SECONDS = 0.1


def lag_recording(recorder: Recorder) -> Callable[[web.Application], AsyncIterator[None]]:
    """A cleanup context that records the event loop's lag while the application runs."""

    async def record(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_watch(recorder))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return record


async def _watch(recorder: Recorder) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        expected = clock() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        recorder.record_lag(max(0.0, clock() - expected))
