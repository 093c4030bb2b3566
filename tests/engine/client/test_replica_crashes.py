"""Replicas and requests that bring engines down: they are found, and no other request fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from support.engine.client.replica_client import (
    LENGTH,
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
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
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
            elif kills and client._isolation.alone is None and random_.random() < 0.02:
                # A kill while a suspect runs alone would look like that request's fault.
                kills -= 1
                engine.crash(-9)
            else:
                engine.step()
        for stream, _ in streams.values():
            if stream.unfinished:
                where(client, stream)  # in exactly one place
        trial = client._isolation.trial
        assert trial is None or set(trial.streams) <= {client._isolation.alone}
        await asyncio.sleep(0)
    await run(client, lambda: not client.unfinished)
    for stream, prompt in streams.values():
        expected = [token(prompt, at) for at in range(LENGTH)]
        assert all(choice == expected for choice in (await tokens(stream)).values())
    for stream in poisonous:
        assert stream.unfinished == 0
    assert not client._isolation.active
    assert client.forecast.waiting_prompt(100) == 0
    assert all(r.forecast.waiting_prompt(100) == 0 for r in client.replicas)
    await client.stop()


async def test_a_hung_engine_is_replaced_and_its_requests_go_on() -> None:
    client = new_client(2, supervision=Supervision(0.4, backoff=0.001))
    await started(client)
    streams = [submit(client, name, [ord(name)]) for name in "abcd"]
    hung = process(client, 0)
    assert {where(client, stream) for stream in streams} == {0, 1}
    async with asyncio.timeout(180):
        while client.unfinished:  # replica 0 never ends a step
            process(client, 1).step()
            await asyncio.sleep(0.05)
    assert not hung.running
    for name, stream in zip("abcd", streams, strict=True):
        assert (await tokens(stream))[0] == [token([ord(name)], at) for at in range(LENGTH)]
    await client.stop()


async def test_many_requests_that_end_while_others_are_placed() -> None:
    """The restarted engine is too small for all but one, which must not wait for them."""
    client = new_client(1)
    await started(client, max_queue=1000)
    large = [submit(client, str(number), [number] * 100) for number in range(600)]
    small = submit(client, "small", [5])
    await crash(client, 0)
    ready(client, 0)
    await crash(client, 0)
    ready(client, 0, max_context=50)
    for stream in large:
        assert stream.unfinished == 0
    assert await run(client, lambda: not client.unfinished) == []
    assert (await tokens(small))[0] == [token([5], at) for at in range(LENGTH)]
    await client.stop()
