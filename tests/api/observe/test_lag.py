"""How often the event loop's lag is measured, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest
from support.virtual_time import run_virtually

from chairlift.api.observe.lag import IDLE_SECONDS, INTERVAL_SECONDS, lag_recording
from chairlift.metrics.recorder import Recorder


def test_it_is_measured_rarely_while_no_request_runs() -> None:
    recorder, running = Recorder("m"), list[int]()

    def measured() -> float:
        lines = generate_latest(recorder.registry).decode().splitlines()
        (count,) = [x for x in lines if x.startswith("chairlift_event_loop_lag_seconds_count")]
        return float(count.split()[-1])

    async def main() -> list[float]:
        watch: Any = lag_recording(recorder, running)(web.Application())
        await anext(watch)
        counts = []
        for requests in ([], [1], []):
            running[:] = requests
            await asyncio.sleep(IDLE_SECONDS)  # the interval that has begun ends
            before = measured()
            await asyncio.sleep(20)
            counts.append(measured() - before)
        await anext(watch, None)
        return counts

    idle, busy, again = run_virtually(main())
    assert 20 / IDLE_SECONDS - 1 <= idle <= 20 / IDLE_SECONDS + 1
    assert 20 / INTERVAL_SECONDS - 1 <= busy <= 20 / INTERVAL_SECONDS + 1
    assert again <= 20 / IDLE_SECONDS + 1
