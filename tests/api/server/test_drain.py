"""Draining, and requests that exceed their time limit."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from support.api.api_server import CHAT, ending, running, until
from support.api.fake_engine import FakeEngine, model_info

PATIENCE = 180.0
LONG = "x" * 100_000


def long_engine(text: str = LONG, step_seconds: float = 0.01) -> FakeEngine:
    """Writes ``text``, one token a step, with a context of 10^6 tokens."""
    return FakeEngine(model_info(max_context=10**6), ending(text), step_seconds=step_seconds)


async def test_draining_finishes_streams_and_refuses_requests() -> None:
    async with running(long_engine("hello" * 8)) as server:
        stream = asyncio.create_task(server.chunks("/v1/chat/completions", CHAT))
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "x"}))
        await until(lambda: len(server.engine.submitted) == 2)
        drained = asyncio.create_task(server.service.drain.finish(PATIENCE))
        await until(lambda: server.service.drain.draining)
        for path in ("/v1/chat/completions", "/tokenize"):
            async with server.http.post(server.url + path, json=CHAT) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) > 0
                assert (await refused.json())["error"]["code"] == "draining"
        status, health = await server.get("/health")
        assert (status, health["reason"]) == (503, "draining: 2 requests to finish")
        assert server.metric("chairlift_requests_rejected_total", reason="draining") == 2
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in await stream)
        assert text == "hello" * 8
        status, reply = await whole
        assert (status, reply["choices"][0]["text"]) == (200, "hello" * 8)
        assert await drained == 0


async def test_a_server_that_has_stopped_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    async with running(long_engine("hello")) as server:
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200
    # Connections and the clients' sessions end in the next turns of the loop.
    await until(lambda: asyncio.all_tasks() == before)


async def test_requests_that_outlast_the_drain_get_an_error() -> None:
    async with running(long_engine()) as server:
        stream = asyncio.create_task(server.events("/v1/chat/completions", CHAT))
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "x"}))
        await until(lambda: len(server.engine.submitted) == 2)
        assert await server.service.drain.finish(0.1) == 2
        *_, last, done = await stream
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        status, reply = await whole
        assert (status, reply["error"]["code"]) == (503, "draining")
        assert len(server.engine.closed) == 2
        assert len(server.service.drain) == 0


# Seconds, in which even a busy machine sends the first tokens.
LIMIT = 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server_s", "client_s"), [(LIMIT, None), (None, LIMIT), (60.0, LIMIT), (LIMIT, 60)]
)
async def test_a_request_over_its_time_limit_ends_with_an_error(
    server_s: float | None, client_s: float | None
) -> None:
    limit = {} if client_s is None else {"timeout": client_s}
    async with running(long_engine(), request_seconds=server_s) as server:
        began = time.monotonic()
        status, reply = await server.post("/v1/completions", {"prompt": "x", **limit})
        assert (status, reply["error"]["code"]) == (504, "timeout")
        assert reply["error"]["message"] == f"not done within {LIMIT} s"
        events = await server.events("/v1/chat/completions", {**CHAT, **limit})
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["message"]) == ("timeout_error", f"not done within {LIMIT} s")
        assert "content" in events[-3]
        assert 2 * LIMIT < time.monotonic() - began < 60
        assert len(server.engine.closed) == 2


async def test_a_request_within_its_time_limit_succeeds() -> None:
    async with running(long_engine("short"), request_seconds=5.0) as server:
        status, _ = await server.post("/v1/completions", {"prompt": "x", "timeout": 4})
        assert status == 200
