"""The fuzzing scenario, shortened, against the real application with a scripted engine."""

from __future__ import annotations

import logging
import os

import pytest
from support.api.api_server import ending, running, until
from support.api.fake_engine import FakeEngine, model_info

from chairlift.loadtest.faults.fuzz import fuzz
from chairlift.loadtest.faults.soak import Soak
from chairlift.loadtest.servers import procfs

REQUESTS = 300


@pytest.mark.system  # half a minute
@pytest.mark.filterwarnings("default")
async def test_bad_requests_get_clear_errors_and_leave_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(model_info(max_context=512), ending("Hello"))
    async with running(engine, idle_seconds=2.0, max_body_bytes=1 << 20) as server:
        report = await fuzz(server.url, REQUESTS, seed=1, head_seconds=2.0)
        assert report.failures == []
        assert report.requests >= REQUESTS
        assert report.statuses[200] > 0
        assert report.statuses[400] > REQUESTS / 4
        assert {404, 405, 415} <= set(report.statuses)
        await until(lambda: not len(server.service.drain))
    bad = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert bad == []


def test_growth_is_measured_over_the_last_third() -> None:
    flat, rising = [5, 900, *[1000] * 4], [1000, 1000, 1000, 1000, 1000, 1100]
    soak = Soak(resident={"flat": flat, "rising": rising, "none": [7]})
    assert soak.growth("flat") == pytest.approx(0)
    assert soak.growth("rising") == pytest.approx(100 / 1050)
    assert soak.growth("none") == 0
    assert procfs.resident_bytes(os.getpid()) > 10e6
