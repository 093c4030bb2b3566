"""The supervising client around a crash of the engine, which a fake process plays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.api.api_server import until
from support.api.fake_engine import model_info
from support.engine.fake_process import Process

from chairlift.api.observe.canary import ATTEMPTS, Canary
from chairlift.engine.client import process_client as clients
from chairlift.engine.client.process_client import TICKS, ProcessClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import EngineDead
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import (
    AdapterLoaded,
    LoadAdapter,
    SamplingParams,
    StepOutput,
    StepStats,
    Submit,
    TokenOutput,
    UnloadAdapter,
)
from chairlift.metrics.recorder import Recorder

SUPERVISION = Supervision(backoff=0.01, longest_backoff=0.01)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessClient]:
    """A client whose first engine has loaded."""
    monkeypatch.setattr(Process, "started", [], raising=False)
    monkeypatch.setattr(clients, "EngineProcess", Process)
    source = ModelSource("tiny", "directory", Path("nowhere"))
    client = ProcessClient(EngineConfig(), source, supervision=SUPERVISION)
    start = asyncio.create_task(client.start())
    await until(lambda: Process.started)
    Process.started[0].receive(model_info())
    await start
    yield client
    Process.started[-1].kill()
    await client.stop()


def submit(client: ProcessClient, name: str, replay: bool = False) -> Stream:
    params = SamplingParams(max_tokens=40, seed=0)
    return client.submit(Submit(name, [1, 2, 3], params, replay=replay))


async def crash(*names: str) -> Process:
    """Crashes the engine while it computes these; returns the next process, still loading."""
    engine = Process.started[-1]
    engine.computing = dict.fromkeys(names, 1.0)
    engine.end(1)
    await until(lambda: Process.started[-1] is not engine)
    return Process.started[-1]


async def test_a_suspect_aborted_during_the_restart_blocks_no_other_request(
    client: ProcessClient,
) -> None:
    suspect, other = submit(client, "suspect"), submit(client, "other")
    (await crash("suspect", "other")).receive(model_info())
    engine = await crash("suspect", "other")
    suspect.close()
    engine.receive(model_info())
    assert engine.submitted == ["other"]
    other.close()


async def test_a_request_too_large_for_the_next_engine_fails(client: ProcessClient) -> None:
    streams = [submit(client, name) for name in ("one", "two")]
    engine = await crash("one", "two")
    engine.receive(model_info(max_context=20))
    assert engine.submitted == []
    for stream in streams:
        ((output,),) = [arrived async for arrived in stream]
        assert "room for 20 tokens" in str(output.error)


async def test_adapters_are_loaded_again_before_the_requests_that_have_them(
    client: ProcessClient,
) -> None:
    loading = [asyncio.create_task(client.adapters.load(name, f"/{name}")) for name in "ab"]
    await until(lambda: len(Process.started[0].sent) == 2)
    for key in ("a#1", "b#2"):
        client.receive(AdapterLoaded(key, f"digest of {key}", 4))
    await asyncio.gather(*loading)
    params = SamplingParams(max_tokens=40, seed=0)
    stream = client.submit(Submit("one", [1, 2, 3], params, adapter="b#2"))
    client.adapters.unload("b")  # the request keeps it
    engine = await crash("one")
    engine.receive(model_info())
    *loads, submit = engine.sent
    assert loads == [
        LoadAdapter("a#1", "/a", "digest of a#1"),
        LoadAdapter("b#2", "/b", "digest of b#2"),
    ]
    assert isinstance(submit, Submit)
    assert submit.adapter == "b#2"
    stream.close()
    assert engine.sent[-1] == UnloadAdapter("b#2")


async def test_an_adapter_that_ends_the_engine_is_not_loaded_again(client: ProcessClient) -> None:
    loading = asyncio.create_task(client.adapters.load("bad", "/bad"))
    await until(lambda: Process.started[0].sent)
    engine = await crash()
    engine.receive(model_info())
    with pytest.raises(EngineDead, match="the engine ended"):
        await loading
    assert engine.sent == []


async def test_requests_that_arrive_during_the_restart_count_as_waiting(
    client: ProcessClient,
) -> None:
    steps: list[StepStats] = []
    client.on_step = steps.append
    await crash()
    streams = [submit(client, name) for name in ("one", "two")]
    assert steps[-1].waiting == 2
    for stream in streams:
        stream.close()
    assert steps[-1].waiting == 0


async def test_stopping_does_not_wait_for_a_loading_engine(client: ProcessClient) -> None:
    stream = submit(client, "waits")
    await crash("waits")
    async with asyncio.timeout(180):
        await client.stop()
    stream.close()


async def test_time_in_which_the_server_was_stopped_is_no_hang_of_a_start(
    client: ProcessClient,
) -> None:
    """As a stopped server that continues: the time limit is over, and the message is unread."""
    client._supervision = Supervision(timeout=1.0, backoff=0.01)
    limit = client._supervision.start_limit(client._first_start)
    assert limit is not None
    engine = await crash()
    await asyncio.sleep(0.1)
    time.sleep(1.1 * limit)  # noqa: ASYNC251
    asyncio.get_running_loop().call_later(limit / TICKS / 2, engine.receive, model_info())
    await until(lambda: client.unhealthy is None)
    assert Process.started[-1] is engine


async def test_a_replay_that_crashes_the_engine_is_not_repeated(
    client: ProcessClient,
) -> None:
    steps: list[StepStats] = []
    client.on_step = steps.append
    canary = Canary(client, Recorder("1.2"), interval=0.01)
    running = asyncio.create_task(canary.run())
    try:
        await until(lambda: canary._row_future)
        theirs = canary.submit(Submit("theirs", [1, 2], SamplingParams(max_tokens=1, seed=0)))
        output = TokenOutput("theirs", 0, [5], finish="length")
        Process.started[-1].receive(StepOutput([output], StepStats()))
        assert [arrived async for arrived in theirs] == [[output]]
        await until(lambda: len(Process.started[0].submitted) == 2)
        (_, replay) = Process.started[0].submitted
        engine = await crash(replay)
        assert [stats.waiting for stats in steps[1:]] == [0]
        assert client.unfinished == 0
        engine.receive(model_info())
        # The canary gives up on the row and waits for another, though attempts are left.
        await until(lambda: canary._row_future and not canary._row_future.done())
        assert ATTEMPTS > 1
        assert engine.submitted == []
    finally:
        running.cancel()
