"""How late the event loop is: for as long as it is held up, no stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from aiohttp import web

from chairlift.api.service import SERVICE
from chairlift.metrics.recorder import Recorder

INTERVAL_SECONDS = 0.1


async def watch_loop(app: web.Application) -> AsyncIterator[None]:
    """Records the loop's lag for as long as the application runs."""
    task = asyncio.create_task(_watch(app[SERVICE].recorder))
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _watch(recorder: Recorder) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        recorder.record_lag(max(0.0, clock() - due))
