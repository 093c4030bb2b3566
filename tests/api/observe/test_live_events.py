"""The events of the live view: its history, how requests ended, and the log of the page's own."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.api.api_server import CHAT, END, Running, ending, engine_replying, ids, running, until
from support.api.fake_engine import FakeEngine, Scripted, model_info, step_stats

from chairlift.api.observe import history, live
from chairlift.api.observe.page import EVENTS, PAGE_PATHS
from chairlift.engine.errors import QueueFull

INTERVAL = 0.2


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", INTERVAL)
    monkeypatch.setattr(history, "MIN_SECONDS", INTERVAL / 4)
    monkeypatch.setattr("chairlift.api.observe.page.PERIOD_SECONDS", INTERVAL / 2)


@asynccontextmanager
async def watching(server: Running) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async def events() -> AsyncIterator[dict[str, Any]]:
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    # The first event of a server that has run for long is larger than a line of aiohttp's client.
    async with (
        aiohttp.ClientSession(read_bufsize=2**20) as http,
        http.get(server.url + EVENTS) as response,
    ):
        yield events()


async def test_the_history_goes_on_while_nobody_watches() -> None:
    async with running(engine_replying("Hello")) as server:
        server.engine.on_step(step_stats([0.1] * 99))
        samples = server.service.live.history.since
        await until(lambda: len(samples(0)[0]) >= 2)
        async with watching(server) as events:
            first = await anext(events)
            past = first["history"]
            assert len(past) >= 2
            assert sum(each["generated_pace"] * each["seconds"] for each in past) == pytest.approx(
                100, rel=0.01
            )
            busy, *idle = past
            assert busy["ttft_p50"] == pytest.approx(0.3, rel=0.05)
            assert busy["itl_p99"] == pytest.approx(0.1, rel=0.05)
            assert (busy["running"], busy["waiting"]) == (3, 2)
            assert busy["kv_share"] == pytest.approx(512 / 2**20, rel=0.001)
            assert {each["ttft_p50"] for each in idle} == {None}
            assert all(each["serving"] and each["generated_pace"] == 0 for each in idle)
            # A new page shows the last minute, too.
            assert first["itl"]["p50"] == pytest.approx(0.1, rel=0.05)
            seen = list(past)
            while len(seen) < len(past) + 3:
                seen += (await anext(events))["history"]
        # Each sample comes once, in order, a period apart.
        times = [each["at"] for each in seen]
        assert times == sorted(set(times))
        elapsed, expected = times[-1] - times[0], INTERVAL * (len(seen) - 1)
        assert elapsed > 0.5 * expected
        assert elapsed < 1.5 * expected + 5, "a busy machine delays samples, but not for long"
        async with watching(server) as events:
            assert (await anext(events))["history"][: len(seen)] == seen


async def test_a_restart_of_the_engine_is_a_gap_and_no_zero() -> None:
    async with running(engine_replying("Hello")) as server, watching(server) as events:
        server.engine.unhealthy = "the engine is being restarted"
        server.service.record_restart("crash")
        seen: list[dict[str, Any]] = []
        while not any(not each["serving"] for each in seen[1:]):
            seen += (await anext(events))["history"]
        server.engine.unhealthy = None
        while not seen[-1]["serving"]:
            seen += (await anext(events))["history"]
        assert sum(each["restarts"] for each in seen) == 1
        assert {each["generated_pace"] for each in seen if not each["serving"]} == {None}
        assert seen[-1]["generated_pace"] == 0
        restarts = server.metric("chairlift_engine_restarts_total", reason="crash")
        assert restarts == 1


async def test_events_tell_how_requests_ended() -> None:
    def script(request: Any, index: int) -> Scripted:
        if list(request.prompt) == ids("!"):
            return Scripted(ids("Hello"), "error", error="nonfinite logits")
        return Scripted([*ids("Hello" * 40), END], ended_by_token=True)

    engine = FakeEngine(model_info(), script, step_seconds=0.01)
    async with running(engine) as server:
        assert (await server.post("/v1/completions", {"prompt": "!"}))[0] == 500
        # The status is sent before the failure.
        await server.events("/v1/completions", {"prompt": "!"})
        assert (await server.post("/v1/completions", {"prompt": "a", "max_tokens": 500}))[0] == 200
        assert (await server.post("/v1/completions", {"prompt": "a", "n": -1}))[0] == 400
        body = {"prompt": "a", "max_tokens": 500, "stream": True}
        async with server.http.post(server.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        vectors = await server.post("/v1/embeddings", {"input": "a"})
        engine.refusal = QueueFull("full", 3)
        assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 429
        await until(lambda: len(server.service.live.recent) == 7)
        async with watching(server) as events:
            event = await anext(events)
        ended = sorted((each["outcome"], each["status"]) for each in event["requests"])
        assert vectors[0] == 200
        assert ended == [
            ("failed", 200),
            ("failed", 500),
            ("ok", 200),
            ("ok", 200),
            ("refused", 400),
            ("refused", 429),
            ("stopped", 499),
        ]
        current = server.service.live.history
        samples = current.since(0)[0]
        assert sum(each.failed for each in samples) + current.current.failed == 2
        assert sum(each.requests for each in samples) + current.current.requests == 7


async def test_riders_have_an_age() -> None:
    async with running(engine_replying("Hello" * 40, step_seconds=0.02)) as server:
        reply = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
        await until(lambda: server.service.live.riders)
        began = time.monotonic()
        await asyncio.sleep(0.3)
        (rider,) = server.service.live.riders
        assert 0.2 <= rider.seconds <= time.monotonic() - began + 1
        assert rider.tokens > 5
        await reply


async def test_the_pages_own_requests_are_logged_at_debug_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "chairlift.api.observe.access")
    async with running(FakeEngine(None, ending(""))) as server:
        for path in sorted(PAGE_PATHS):
            assert (await server.http.get(server.url + path)).status == 200
        async with watching(server) as events:
            await anext(events)
        levels: dict[str, tuple[int, int]] = {}
        await until(lambda: len(caplog.records) == len(PAGE_PATHS) + 1)
        for record in caplog.records:
            fields = vars(record)
            levels[fields["route"]] = (record.levelno, fields["status"])
        # A closed page leaves its stream, which is no failure.
        assert levels.pop(EVENTS) == (logging.DEBUG, 499)
        assert levels == dict.fromkeys(PAGE_PATHS, (logging.DEBUG, 200))
        assert server.metric("chairlift_client_disconnects_total") == 0
        # A refusal stays visible.
        caplog.clear()
        async with server.http.get(server.url + EVENTS + "/none") as response:
            assert response.status == 404
        assert [record.levelno for record in caplog.records] == [logging.INFO]


async def test_a_stopped_request_has_a_reason_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "chairlift.api.observe.access")
    async with running(engine_replying("Hello" * 40, step_seconds=0.02)) as server:
        body = {**CHAT, "stream": True}
        async with server.http.post(server.url + "/v1/chat/completions", json=body) as response:
            await response.content.readline()
            response.close()
        await until(lambda: caplog.records)
    (record,) = caplog.records
    fields = vars(record)
    assert (fields["status"], fields["finish_reason"]) == (499, "abort")
    assert fields["reason"] == "the client left before the end of the reply"
