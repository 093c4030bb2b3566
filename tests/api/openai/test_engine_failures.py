"""Requests while the engine loads, is unhealthy, dies or fails, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest
from support.api.api_server import (
    CHAT,
    MESSAGES,
    Running,
    ending,
    engine_replying,
    ids,
    running,
    until,
)
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.engine.messages import Submit


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


async def test_loading() -> None:
    async with running(FakeEngine(None, ending("x"))) as server:
        for path in ("/health", "/ping"):
            status, body = await server.get(path)
            assert (status, body["reason"]) == (503, "loading the model")
        with pytest.raises(openai.InternalServerError) as error:
            await server.openai.completions.create(model="org/tiny", prompt="x")
        assert error.value.status_code == 503
        assert int(error.value.response.headers["Retry-After"]) >= 1
        status, _ = await server.get("/v1/models")
        assert status == 503
        async with server.http.get(f"{server.url}/metrics") as response:
            assert response.status == 200


async def test_an_unhealthy_engine(server: Running) -> None:
    server.engine.unhealthy = "no step for 60 s"
    status, body = await server.get("/health")
    assert (status, body["reason"]) == (503, "no step for 60 s")
    status, _ = await server.post("/v1/completions", {"prompt": "x"})
    assert status == 503


async def test_an_engine_that_dies_ends_streams_with_an_error_event() -> None:
    engine = FakeEngine(model_info(), ending("x" * 1000), step_seconds=0.01)
    async with running(engine) as server:
        stream = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True
        )
        unstreamed = asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "n": 2}))
        await anext(aiter(stream))
        await until(lambda: len(engine.submitted) == 2)
        engine.dead.set()
        with pytest.raises(openai.APIError, match="has ended"):
            async for _ in stream:
                pass
        status, body = await unstreamed
        assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_a_choice_that_fails() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abc"), finish="error", error="out of memory")

    async with running(FakeEngine(model_info(), script)) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["message"]) == (500, "out of memory")
        events = await server.events("/v1/chat/completions", CHAT)
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert events[-1] == "data: [DONE]"


async def test_a_choice_that_fails_by_its_request() -> None:
    """Such as a grammar that becomes too expensive on the way."""

    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abc"), "error", error="a bad grammar", client_error=True)

    async with running(FakeEngine(model_info(), script)) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["message"]) == (400, "a bad grammar")
        events = await server.events("/v1/chat/completions", CHAT)
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["type"] == "invalid_request_error"
        assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_frees_its_rows(stream: bool, n: int) -> None:
    engine = FakeEngine(model_info(), ending("x" * 1000), step_seconds=0.01)
    async with running(engine) as server:
        body = {"prompt": "x", "stream": stream, "n": n}

        async def go() -> None:
            async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
                await response.read()

        task = asyncio.create_task(go())
        await until(lambda: engine.submitted)
        await asyncio.sleep(0.05)
        task.cancel()
        await until(lambda: engine.closed)
        await until(lambda: server.metric("chairlift_client_disconnects_total") == 1)


async def test_silent_streams_are_kept_alive() -> None:
    engine = FakeEngine(model_info(), ending("late"), first_step_seconds=0.35)
    async with running(engine, keep_alive_seconds=0.1) as server:
        events = await server.events("/v1/chat/completions", CHAT)
        assert 2 <= events.count(": keep-alive") <= 4
        assert events[0] == ": keep-alive"
        reply = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
        assert text == "late"
