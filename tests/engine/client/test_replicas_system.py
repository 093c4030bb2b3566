"""Two replicas of a tiny model on the CPU: hits of their prefix caches, and a killed engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from support.engine.engine_client import until
from support.tiny import tiny_model_dir

from chairlift.engine.client.factory import make_client
from chairlift.engine.client.interface import EngineClient
from chairlift.engine.client.local import LocalClient
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import SamplingParams, StepStats, Submit
from chairlift.loadtest.data.repetition import prefix_repetition_requests

# System: it starts and kills engine processes.
pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

CONFIG = EngineConfig(max_rows=8, kv_memory=32 << 20, prefix_cache_bytes=32 << 20)
PROMPTS, PREFIXES, CONCURRENCY = 48, 6, 4
# Tokens of a prompt's prefix and suffix, and of the output.
LENGTHS = (448, 32, 8)
_ids = count()


class Run(NamedTuple):
    """A request's tokens, and the times at which they arrived."""

    tokens: list[int]
    times: list[float]


class Measured(NamedTuple):
    """What one client made of the prompts: the outputs, and the part of prompt tokens cached."""

    outputs: list[list[int]]
    hits: float


async def read(client: EngineClient, prompt: list[int], length: int) -> Run:
    params = SamplingParams(max_tokens=length, seed=0, temperature=0.0)
    stream = client.submit(Submit(f"r{next(_ids)}", prompt, params, 1, time.monotonic()))
    tokens: list[int] = []
    times = [time.monotonic()]
    async with asyncio.timeout(120):
        async for batch in stream:
            times.append(time.monotonic())
            for output in batch:
                assert output.error is None
                tokens += output.token_ids
    return Run(tokens, times)


async def repeated_prefixes() -> list[list[int]]:
    async def count_bytes(text: str) -> int:
        return len(text.encode())

    requests = await prefix_repetition_requests(
        *(PROMPTS, *LENGTHS[:2], PREFIXES, LENGTHS[2]),
        np.random.default_rng(5),
        count_bytes,
        lambda: None,
    )
    return [[3 + byte for byte in request.prompt.encode()] for request in requests]


async def measure(client: EngineClient, prompts: list[list[int]]) -> Measured:
    steps: list[StepStats] = []
    client.on_step = steps.append
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: list[int]) -> list[int]:
        async with slots:
            return (await read(client, prompt, LENGTHS[2])).tokens

    outputs = await asyncio.gather(*map(one, prompts))
    queries = sum(stats.prefix_queries for stats in steps)
    assert queries >= sum(map(len, prompts))
    return Measured(outputs, sum(stats.prefix_hits for stats in steps) / queries)


def long_prompt(seed: int) -> list[int]:
    return [3 + (seed * 37 + at * (seed + 5)) % 240 for at in range(40)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path: Path = tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")
    return ModelSource("tiny", "directory", path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(source: ModelSource) -> AsyncIterator[LocalClient]:
    client = LocalClient(CONFIG, source)
    await client.start()
    yield client
    await client.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(source: ModelSource) -> AsyncIterator[ReplicaClient]:
    config = EngineConfig(max_rows=8, kv_memory=64 << 20, prefix_cache_bytes=64 << 20, replicas=2)
    supervision = Supervision(backoff=0.05, longest_backoff=0.2)
    client = make_client(config, source, "error", supervision=supervision)
    assert isinstance(client, ReplicaClient)
    await client.start()
    yield client
    await client.stop()


async def test_prefixes_are_found_nearly_as_often_as_in_one_engine(
    alone: LocalClient, replicas: ReplicaClient
) -> None:
    prompts = await repeated_prefixes()
    one = await measure(alone, prompts)
    two = await measure(replicas, prompts)
    assert two.outputs == one.outputs
    print(replicas._router.speed.fit(), replicas._router._sent)
    print(f"hits: {one.hits:.3f} of prompt tokens in one engine, {two.hits:.3f} in two")
    assert one.hits > 0.5
    # Had each replica computed each prefix, this were 6/7.
    assert two.hits >= 0.9 * one.hits
    # Both have worked.
    assert min(replicas._router._sent) > 0


async def test_no_request_notices_a_killed_engine(
    alone: LocalClient, replicas: ReplicaClient
) -> None:
    requests = [(long_prompt(seed), 400) for seed in range(8)]
    expected = [(await read(alone, *request)).tokens for request in requests]
    restarts: list[str] = []
    replicas.on_restart = restarts.append
    running = [asyncio.create_task(read(replicas, *request)) for request in requests]
    await until(lambda: all(len(replica.streams) >= 3 for replica in replicas.replicas))
    streams = [stream for replica in replicas.replicas for stream in replica.streams]
    await until(lambda: min(stream.progress.get(0, 400) for stream in streams) > 20)
    lost = len(replicas.replicas[0].streams)
    assert replicas.replicas[0].pid is not None
    killed = time.monotonic()
    os.kill(replicas.replicas[0].pid, signal.SIGKILL)
    await until(lambda: replicas.degraded)
    assert replicas.unhealthy is None
    late = asyncio.create_task(read(replicas, *requests[0]))
    runs = await asyncio.gather(*running, late)
    ended = time.monotonic()
    await until(lambda: replicas.degraded is None)
    restart = time.monotonic() - killed
    gap = max(
        after - before
        for run in runs
        for before, after in zip(run.times, run.times[1:], strict=False)
        if after > killed
    )
    print(
        f"{lost} requests moved, longest gap {gap:.2f} s, all done after {ended - killed:.2f} s, "
        f"restart {restart:.2f} s"
    )
    assert lost >= 3
    assert [run.tokens for run in runs] == [*expected, expected[0]]
    assert restarts == ["crash"]
    assert gap < restart
    # The restarted engine takes requests again.
    both = [asyncio.create_task(read(replicas, [3 + i] * 200, 8)) for i in range(4)]
    await until(lambda: all(replica.streams for replica in replicas.replicas))
    await asyncio.gather(*both)
