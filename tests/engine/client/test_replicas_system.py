"""Two replicas of a tiny model on the CPU: hits of their prefix caches, and a killed engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from support.engine.client.engine_client import until
from support.tiny import tiny_model_dir

from chairlift.engine.client.factory import make_client
from chairlift.engine.client.interface import EngineClient
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.loadtest.data.repetition import prefix_repetition_requests

# System: it starts and kills engine processes.
pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

# For two replicas together.
CONFIG = EngineConfig(
    max_rows=12, kv_memory=64 << 20, prefix_cache_bytes=64 << 20, swap_memory=0, replicas=2
)
PROMPTS, PREFIXES, CONCURRENCY = 48, 6, 4
# Tokens of a prompt's prefix and suffix, and of the output.
PREFIX, SUFFIX, OUTPUT = 448, 32, 8
# Tokens that are generated while an engine is killed.
LENGTH = 300
_ids = count()


class Run(NamedTuple):
    """A request's tokens, the times at which they arrived, and its cached prompt tokens."""

    tokens: list[int]
    times: list[float]
    cached: int


async def read(client: EngineClient, prompt: list[int], length: int, salt: str = "") -> Run:
    params = SamplingParams(max_tokens=length, seed=0, temperature=0.0)
    stream = client.submit(Submit(f"r{next(_ids)}", prompt, params, 1, time.monotonic(), salt))
    tokens: list[int] = []
    times = [time.monotonic()]
    cached = 0
    async with asyncio.timeout(120):
        async for batch in stream:
            times.append(time.monotonic())
            for output in batch:
                assert output.error is None
                tokens += output.token_ids
                cached = max(cached, output.cached_tokens)
    return Run(tokens, times, cached)


async def repeated_prefixes() -> list[list[int]]:
    async def count_bytes(text: str) -> int:
        return len(text.encode())

    requests = await prefix_repetition_requests(
        *(PROMPTS, PREFIX, SUFFIX, PREFIXES, OUTPUT),
        np.random.default_rng(5),
        count_bytes,
        lambda: None,
    )
    return [[3 + byte for byte in request.prompt.encode()] for request in requests]


async def measure(client: EngineClient, prompts: list[list[int]], salt: str) -> list[Run]:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: list[int]) -> Run:
        async with slots:
            return await read(client, prompt, OUTPUT, salt)

    return await asyncio.gather(*map(one, prompts))


def long_prompt(seed: int) -> list[int]:
    return [3 + (seed * 37 + at * (seed + 5)) % 240 for at in range(40)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReplicaClient]:
    path = tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")
    source = ModelSource("tiny", "directory", path)
    supervision = Supervision(backoff=0.05, longest_backoff=0.2)
    client = make_client(CONFIG, source, "error", supervision=supervision)
    assert isinstance(client, ReplicaClient)
    await client.start()
    yield client
    await client.stop()


async def test_prefixes_are_found_nearly_as_often_as_in_one_engine(client: ReplicaClient) -> None:
    prompts = await repeated_prefixes()
    # A replica by itself is one engine; another salt shares no prefix with it.
    alone = await measure(client.replicas[0], prompts, "alone")
    one = sum(run.cached for run in alone)
    assert one > 0.7 * sum(map(len, prompts))
    # Requests leave a replica that the machine stops for a while, and its prefixes.
    for salt in ("routed", "routed again", "and again"):
        routed = await measure(client, prompts, salt)
        assert [run.tokens for run in routed] == [run.tokens for run in alone]
        two = sum(run.cached for run in routed)
        print(f"cached prompt tokens: {one} in one engine, {two} in two")
        # If each replica had computed each prefix, this would be 6/7.
        if two >= 0.9 * one:
            break
    assert two >= 0.9 * one
    # Both have worked.
    assert min(client._router._sent) > PREFIX


async def test_no_request_notices_a_killed_engine(client: ReplicaClient) -> None:
    prompts = [long_prompt(seed) for seed in range(8)]
    undisturbed = [read(client.replicas[0], prompt, LENGTH, "alone") for prompt in prompts]
    expected = [run.tokens for run in await asyncio.gather(*undisturbed)]
    restarts: list[str] = []
    client.on_restart = restarts.append
    lost = 0
    while lost < 3:  # again where this process was stopped for so long that streams have ended
        running = [asyncio.create_task(read(client, prompt, LENGTH)) for prompt in prompts]
        await asyncio.sleep(0)  # the tasks submit their requests
        streams = [stream for replica in client.replicas for stream in replica.streams]
        assert min(len(replica.streams) for replica in client.replicas) >= 3
        await until(
            lambda running=streams: min(one.progress.get(0, LENGTH) for one in running) > 20
        )
        lost = len(client.replicas[0].streams)
        if lost < 3:
            await asyncio.gather(*running)
    assert client.replicas[0].pid is not None
    os.kill(client.replicas[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    await until(lambda: client.degraded)
    assert client.unhealthy is None

    async def restarted() -> float:
        await until(lambda: client.degraded is None)
        return time.monotonic() - killed

    restart = asyncio.create_task(restarted())
    late = asyncio.create_task(read(client, prompts[0], LENGTH))
    runs = await asyncio.gather(*running, late)
    gap = max(b - a for run in runs for a, b in pairwise(run.times) if b > killed)
    seconds = await restart
    print(f"{lost} requests moved; longest gap {gap:.2f} s, restart {seconds:.2f} s")
    assert [run.tokens for run in runs] == [*expected, expected[0]]
    assert restarts == ["crash"]
    assert gap < seconds
    # The restarted engine takes requests again.
    both = [asyncio.create_task(read(client, [3 + i] * 200, LENGTH)) for i in range(4)]
    await until(lambda: all(replica.streams for replica in client.replicas))
    await asyncio.gather(*both)
