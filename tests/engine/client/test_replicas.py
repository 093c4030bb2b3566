"""Replicas of one model: their start, where requests go, and those of a lost engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.api.api_server import until
from support.api.fake_engine import model_info
from support.engine.client.replica_client import (
    LENGTH,
    SUPERVISION,
    crash,
    new_client,
    process,
    ready,
    started,
    step_all,
    submit,
    tokens,
    where,
)
from support.engine.fake_process import ComputingProcess, Process, token

from chairlift.engine.client import process_client as clients
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.errors import EngineDead, ModelError, PromptTooLong, QueueFull
from chairlift.engine.messages import Loading, SamplingParams, StartFailed, StepStats, Submit


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "started", [], raising=False)
    monkeypatch.setattr(clients, "EngineProcess", ComputingProcess)


@pytest.fixture
async def client() -> AsyncIterator[ReplicaClient]:
    """Two replicas that have loaded."""
    client = new_client(2)
    await started(client)
    yield client
    await client.stop()


# ---- start and end


async def test_one_replica_measures_the_memory_for_all_on_its_device() -> None:
    client = new_client(3)
    shown: list[Loading] = []
    start = asyncio.create_task(client.start(shown.append))
    await until(lambda: Process.started)
    await asyncio.sleep(0.01)
    assert len(Process.started) == 1
    assert client.unhealthy == "loading the model"
    (first,) = Process.started
    assert first.start is not None
    assert (first.start.config.host_engines, first.start.config.device_engines) == (3, 3)
    first.receive(Loading("loading weights"))
    first.receive(model_info(kv_limit_bytes=3000, prefix_bytes=1000))
    await until(lambda: len(Process.started) == 3)
    for other in Process.started[1:]:
        assert other.start is not None
        config = other.start.config
        assert (config.kv_memory, config.prefix_cache_bytes) == (3000, 1000)
        other.receive(model_info(kv_limit_bytes=3000, prefix_bytes=1000, max_context=1000))
    info = await start
    assert (info.replicas, info.max_rows, info.max_choices) == (3, 24, 8)
    assert (info.kv_limit_bytes, info.prefix_bytes, info.max_context) == (9000, 3000, 1000)
    assert "loading weights" in [str(loading) for loading in shown]
    # A later start keeps the sizes: what it would measure depends on the others.
    await crash(client, 0)
    restarted = process(client, 0).start
    assert restarted is not None
    assert (restarted.config.kv_memory, restarted.config.prefix_cache_bytes) == (3000, 1000)
    await client.stop()


async def test_a_model_that_one_replica_cannot_load_ends_the_start() -> None:
    client = new_client(2)
    start = asyncio.create_task(client.start())
    await until(lambda: Process.started)
    Process.started[0].receive(model_info())
    await until(lambda: len(Process.started) == 2)
    Process.started[1].receive(StartFailed("no room"))
    Process.started[1].end(0)
    with pytest.raises(ModelError, match="no room"):
        await start
    assert not any(process.running for process in Process.started)


async def test_stopping_ends_all_processes_and_streams(client: ReplicaClient) -> None:
    stream = submit(client, "one")
    await client.stop()
    assert not any(process.running for process in Process.started)
    assert "stopped" in await client.died()
    with pytest.raises(EngineDead):
        await tokens(stream)
    with pytest.raises(EngineDead):
        submit(client, "late")


async def test_a_replica_that_never_starts_again_leaves_its_work_to_the_others(
    client: ReplicaClient,
) -> None:
    restarts: list[str] = []
    client.on_restart = restarts.append
    streams = [submit(client, name) for name in "abcd"]
    process(client, 0).crash()
    for _ in range(SUPERVISION.attempts):
        await until(
            lambda: isinstance(client.replicas[0]._engine, Process) and process(client, 0).running
        )
        process(client, 0).end(1)
    await until(lambda: client.replicas[0].dead)
    assert restarts == ["crash", "start"]
    assert client.unhealthy is None
    assert "replica 0: the engine has ended" in str(client.degraded)
    assert [where(client, stream) for stream in streams] == [1] * 4
    await until(lambda: client.info and client.info.replicas == 1)
    assert client.info is not None
    assert client.info.max_rows == client.info.max_choices == 8
    process(client, 1).crash(-9)
    for _ in range(SUPERVISION.attempts):
        await until(
            lambda: isinstance(client.replicas[1]._engine, Process) and process(client, 1).running
        )
        process(client, 1).end(1)
    assert "all 2 replicas have ended" in await client.died()
    for stream in streams:
        with pytest.raises(EngineDead, match="all 2 replicas"):
            await tokens(stream)


# ---- requests


async def test_requests_with_a_prefix_stay_together_and_others_are_balanced(
    client: ReplicaClient,
) -> None:
    for chat in range(4):
        for turn in range(1, 4):
            prompt = [chat] * 200 + list(range(300, 300 + 70 * turn))
            stream = submit(client, f"{chat}-{turn}", prompt)
            home = where(client, stream)
            assert home == chat % 2
            while stream.unfinished:
                step_all(client)


async def test_a_chat_returns_to_the_replica_of_its_short_first_turn(
    client: ReplicaClient,
) -> None:
    homes = set()
    for chat in range(4):
        prompt = [chat] * 60  # shorter than a block; with the reply it is longer
        first = submit(client, f"{chat}-1", prompt)
        home = where(client, first)
        while first.unfinished:
            step_all(client)
        reply = [token(prompt, position) for position in range(LENGTH)]
        again = submit(client, f"{chat}-2", [*prompt, *reply, 9])
        assert where(client, again) == home
        homes.add(home)
        while again.unfinished:
            step_all(client)
    assert homes == {0, 1}


async def test_the_choices_of_a_request_stay_in_one_replica(client: ReplicaClient) -> None:
    stream = submit(client, "many", [5, 6], n=3)
    other = submit(client, "other")
    assert where(client, stream) != where(client, other)
    process(client, where(client, stream) or 0).step()
    await crash(client, where(client, stream) or 0)
    while client.unfinished:
        step_all(client)
    expected = [token([5, 6], position) for position in range(LENGTH)]
    assert await tokens(stream) == dict.fromkeys(range(3), expected)


async def test_the_queue_is_that_of_all_replicas(client: ReplicaClient) -> None:
    limit = 2 * 8 + 16
    streams = [submit(client, str(number), [number]) for number in range(limit)]
    homes = [where(client, stream) for stream in streams]
    assert homes.count(0) == homes.count(1) == limit / 2
    assert client.unfinished == limit
    with pytest.raises(QueueFull, match=f"{limit} is the limit"):
        submit(client, "one more")
    with pytest.raises(PromptTooLong):
        submit(client, "long", [1] * 3000)
    streams[0].close()
    assert client.unfinished == limit - 1
    submit(client, "one more")


# ---- lost engines


@pytest.mark.parametrize("code", [1, -9])
async def test_a_lost_engines_requests_continue_in_the_other_at_once(
    client: ReplicaClient, code: int
) -> None:
    steps: list[StepStats] = []
    client.on_step = steps.append
    streams = {name: submit(client, name, [ord(name)]) for name in "abcdef"}
    for _ in range(3):
        step_all(client)
    await crash(client, 0, code)
    # The next process loads and loads.
    assert client.unhealthy is None
    assert "replica 0: the engine is being restarted" in str(client.degraded)
    assert [where(client, stream) for stream in streams.values()] == [1] * 6
    while client.unfinished:
        process(client, 1).step()
    for name, stream in streams.items():
        assert (await tokens(stream))[0] == [token([ord(name)], at) for at in range(LENGTH)]
    reasons = [choice.reason for stats in steps for choice in stats.finished]
    assert reasons == ["length"] * 6
    assert (steps[-1].running, steps[-1].waiting) == (0, 0)
    ready(client, 0)
    assert client.degraded is None
    assert {where(client, submit(client, name)) for name in "xy"} == {0, 1}


async def test_requests_wait_while_all_engines_are_lost(client: ReplicaClient) -> None:
    steps: list[StepStats] = []
    client.on_step = steps.append
    early = submit(client, "early")
    for number in (0, 1):
        await crash(client, number, computing=False)
    assert str(client.unhealthy).count("being restarted") == 2
    assert client.accepts
    late, gone = submit(client, "late"), submit(client, "gone")
    assert where(client, late) is None
    assert steps[-1].waiting == 3
    gone.close()
    assert steps[-1].waiting == 2
    ready(client, 1)
    assert where(client, early) == where(client, late) == 1


async def test_a_replay_ends_with_its_engine(client: ReplicaClient) -> None:
    params = SamplingParams(max_tokens=LENGTH, seed=0)
    replay = client.submit(Submit("replay", [1], params, replay=True))
    assert client.unfinished == 0
    await crash(client, where(client, replay) or 0)
    assert replay.unfinished == 0


async def test_a_request_that_no_restarted_engine_holds_fails_with_a_message() -> None:
    client = new_client(1)
    await started(client)
    stream = submit(client, "large", [1] * 100)
    await crash(client, 0)
    ready(client, 0, max_context=20)
    ((output,),) = [batch async for batch in stream]
    assert "room for 20 tokens" in str(output.error)
    await client.stop()
