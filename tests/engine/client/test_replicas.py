"""Replicas of one model: where requests go, and what happens to those of a lost engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.api.api_server import until
from support.api.fake_engine import model_info
from support.engine.fake_process import ComputingProcess, Process, token

from chairlift.engine.client import process_client as clients
from chairlift.engine.client.placement import places
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import EngineDead, ModelError, PromptTooLong, QueueFull
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import (
    Loading,
    ModelInfo,
    SamplingParams,
    StartFailed,
    StepStats,
    Submit,
)

SUPERVISION = Supervision(attempts=2, backoff=0.001, longest_backoff=0.001)
LENGTH = 20
INFO = {"prefix_bytes": 1 << 20}


def new_client(replicas: int, **settings: object) -> ReplicaClient:
    config = EngineConfig(replicas=replicas, **settings)  # type: ignore[arg-type]
    source = ModelSource("tiny", "directory", Path("nowhere"))
    return ReplicaClient(places(config, "cpu", ()), source, supervision=SUPERVISION)


async def started(client: ReplicaClient, **info: object) -> ModelInfo:
    """Starts a client, and lets every engine load."""
    start = asyncio.create_task(client.start())
    for number in range(len(client.replicas)):
        await until(lambda number=number: len(Process.started) > number)
        Process.started[number].receive(model_info(**{**INFO, **info}))
    return await start


def process(client: ReplicaClient, number: int) -> ComputingProcess:
    """The present process of a replica."""
    engine = client.replicas[number]._engine
    assert isinstance(engine, ComputingProcess)
    return engine


def runs(client: ReplicaClient, number: int) -> bool:
    engine = client.replicas[number]._engine
    return isinstance(engine, ComputingProcess) and engine.running


async def crash(client: ReplicaClient, number: int, code: int = 1, computing: bool = True) -> None:
    """Ends a replica's process, and waits until the next one loads."""
    engine = process(client, number)
    engine.crash(code) if computing else engine.end(code)
    await until(lambda: client.replicas[number]._engine not in (engine, None))


def ready(client: ReplicaClient, number: int, **info: object) -> None:
    """Lets the present process of a replica finish loading."""
    process(client, number).receive(model_info(**{**INFO, **info}))


def submit(client: ReplicaClient, name: str, prompt: list[int] | None = None, n: int = 1) -> Stream:
    params = SamplingParams(max_tokens=LENGTH, seed=0)
    return client.submit(Submit(name, prompt or [1, 2, 3], params, n))


def where(client: ReplicaClient, stream: Stream) -> int | None:
    """The replica that has a request; None if it waits."""
    homes: list[int | None] = [r.number for r in client.replicas if stream in r.streams]
    homes += [None] * (stream in client._streams.values())
    (home,) = homes
    return home


def step_all(client: ReplicaClient) -> None:
    for replica in client.replicas:
        if isinstance(engine := replica._engine, ComputingProcess) and replica.ready:
            engine.step()


async def tokens(stream: Stream) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    async with asyncio.timeout(10):
        async for batch in stream:
            for output in batch:
                outputs.setdefault(output.index, []).extend(output.token_ids)
    return outputs


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


# ---- requests that bring engines down


async def run(client: ReplicaClient, done: Callable[[], bool]) -> list[int]:
    """Steps all engines, and loads the next where one has crashed.

    Returns:
        The replica of each crash.
    """
    crashes: list[int] = []
    for _ in range(20_000):
        if done():
            return crashes
        for replica in client.replicas:
            engine = replica._engine
            if engine is None or not isinstance(engine, ComputingProcess):
                continue
            if not engine.running:
                continue
            if not replica.ready:
                ready(client, replica.number)
            engine.step()
            crashes += [] if engine.running else [replica.number]
        await asyncio.sleep(0)
    raise AssertionError("it did not end")


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
async def test_a_poisonous_request_is_found_in_three_crashes(replicas: int) -> None:
    client = new_client(replicas)
    await started(client)
    streams = [submit(client, str(number), [number]) for number in range(12)]
    step_all(client)
    poison = submit(client, "poison", [ComputingProcess.poison])
    crashes = await run(client, lambda: not client.unfinished)
    assert len(crashes) <= 3
    assert len(set(crashes)) <= 2  # a third replica never runs it
    outputs = [output async for batch in poison for output in batch]
    assert [output.finish for output in outputs] == ["error"]
    assert "died twice" in str(outputs[0].error)
    for number, stream in enumerate(streams):
        assert (await tokens(stream))[0] == [token([number], at) for at in range(LENGTH)]
    await client.stop()


async def test_others_do_not_wait_for_a_trial(client: ReplicaClient) -> None:
    """With both engines lost, the first that is back serves; the trial waits for the second."""
    poison = submit(client, "poison", [ComputingProcess.poison])
    innocent = submit(client, "innocent", [7])
    home = where(client, poison)
    assert home is not None
    await crash(client, home)
    assert where(client, poison) == where(client, innocent) == 1 - home
    await crash(client, 1 - home)
    ready(client, home)
    assert where(client, innocent) == home
    assert where(client, poison) is None
    ready(client, 1 - home)
    assert where(client, poison) == 1 - home
    assert where(client, submit(client, "later", [8])) == home
    await crash(client, 1 - home)
    assert poison.unfinished == 0
    assert where(client, innocent) == home
    ready(client, 1 - home)
    assert {where(client, submit(client, name, [9])) for name in "xyz"} == {0, 1}


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_happens_every_innocent_request_gets_its_tokens(seed: int) -> None:
    """Random arrivals, departures, kills and slow restarts, some with poison."""
    random_ = random.Random(seed)
    client = new_client(random_.randrange(1, 5))
    await started(client)
    streams: dict[str, tuple[Stream, list[int]]] = {}
    poisonous: list[Stream] = []
    kills = random_.randrange(3)
    for round_ in range(120):
        if random_.random() < 0.3 and client.unfinished < 20:
            bad = random_.random() < 0.05 and len(poisonous) < 2
            prompt = [random_.randrange(500) for _ in range(random_.choice((1, 5, 200)))]
            prompt = [*prompt, ComputingProcess.poison] if bad else prompt
            stream = submit(client, str(round_), prompt, random_.choice((1, 1, 2)))
            if bad:
                poisonous.append(stream)
            elif random_.random() < 0.1:
                stream.close()
            else:
                streams[str(round_)] = stream, prompt
        for replica in client.replicas:
            engine = replica._engine
            if not isinstance(engine, ComputingProcess) or not engine.running:
                continue
            if not replica.ready:
                if random_.random() < 0.2:
                    ready(client, replica.number)
            elif kills and random_.random() < 0.02:
                kills -= 1
                engine.crash(-9)
            else:
                engine.step()
        for stream, _ in streams.values():
            if stream.unfinished:
                where(client, stream)  # in exactly one place
        alone = client._quarantine.alone
        if client._trial is not None and alone is not None:
            assert set(client._trial.streams) <= {alone}
        await asyncio.sleep(0)
    await run(client, lambda: not client.unfinished)
    for stream, prompt in streams.values():
        expected = [token(prompt, at) for at in range(LENGTH)]
        assert all(choice == expected for choice in (await tokens(stream)).values())
    for stream in poisonous:
        assert stream.unfinished == 0
    assert not client._quarantine.active
    assert client.forecast.waiting_prompt(100) == 0
    assert all(r.forecast.waiting_prompt(100) == 0 for r in client.replicas)
    await client.stop()
