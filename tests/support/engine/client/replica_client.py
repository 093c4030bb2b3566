"""A client of replicas whose engine processes a test plays (``fake_process``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.api.api_server import until
from support.api.fake_engine import model_info
from support.engine.fake_process import ComputingProcess, Process

from chairlift.engine.client.placement import places
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import ModelInfo, SamplingParams, Submit

SUPERVISION = Supervision(attempts=2, backoff=0.001, longest_backoff=0.001)
LENGTH = 20
INFO = {"prefix_bytes": 1 << 20}


def new_client(replicas: int, supervision: Supervision = SUPERVISION) -> ReplicaClient:
    config = EngineConfig(replicas=replicas)
    source = ModelSource("tiny", "directory", Path("nowhere"))
    return ReplicaClient(places(config, "cpu", ()), source, supervision=supervision)


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
    async with asyncio.timeout(180):
        async for batch in stream:
            for output in batch:
                outputs.setdefault(output.index, []).extend(output.token_ids)
    return outputs
