"""Chairlift on a real Ray: all APIs, autoscaling and lost replicas."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.api.ray_cluster import PATIENCE, RayCluster, ray_cluster
from support.tiny import tiny_model_dir

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.system

# The clients pause between requests to leave some of the machine to other tests. On a fast one they
# still keep more than a request running, and the one of the last phase less than this many.
CLIENTS = 4
TARGET_REQUESTS = 0.4
PAUSE_SECONDS = 0.7
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "stream": True, "ignore_eos": True}
# Path, body, and what the last bytes of the stream contain.
STREAMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 4}, "[DONE]"),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "stream": True},
        "[DONE]",
    ),
    (
        "/v1/responses",
        {"model": "tiny", "input": "Hi", "max_output_tokens": 4, "stream": True},
        "response.",
    ),
    (
        "/v1/messages",
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "stream": True},
        "message_stop",
    ),
    (
        "/api/chat",
        {"model": "tiny:latest", "messages": MESSAGES, "options": {"num_predict": 4}},
        '"done":true',
    ),
    (
        "/api/generate",
        {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 4}},
        '"done":true',
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = tiny_model_dir(folder, "llama")
    config = folder / "cluster.yaml"
    # JSON is YAML.
    config.write_text(json.dumps(_config(model)))
    with ray_cluster(folder) as running:
        deployed = running.deploy(config)
        assert deployed.returncode == 0, deployed.stderr
        assert deployed.stdout.splitlines()[-1] == "chairlift serves tiny"
        yield running


def _config(model: Path) -> dict[str, Any]:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": TARGET_REQUESTS,
        "upscale_delay_s": 0,
        "downscale_delay_s": 4,
        "look_back_period_s": 3,
    }
    flags = {"max-rows": 4, "threads": 1}
    one = {"model": str(model), "name": "tiny", "flags": flags, "autoscaling": scaling}
    return {"models": [{**one, "drain_seconds": 60}]}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


async def test_streams_of_all_apis(cluster: RayCluster, http: aiohttp.ClientSession) -> None:
    for path, body, end in STREAMS:
        async with http.post(cluster.url + path, json=body) as reply:
            assert reply.status == 200, path
            text = await reply.text()
        lines = [line for line in text.splitlines() if line]
        assert end in lines[-1], (path, text)
        # The pieces of a random model's text are rarely complete characters.
        assert len(lines) >= 2, path
    async with http.get(cluster.url + "/v1/models") as reply:
        assert [card["id"] for card in (await reply.json())["data"]] == ["tiny"]


async def test_pieces_of_a_stream_arrive_one_by_one(
    cluster: RayCluster, http: aiohttp.ClientSession
) -> None:
    """A client that leaves after the first piece ends the request in the engine."""
    body = {**CHAT, "max_tokens": 3000}
    async with http.post(cluster.url + "/v1/chat/completions", json=body) as reply:
        first = await reply.content.readany()
        assert b"[DONE]" not in first
        assert first.startswith(b"data: ")
    for _ in range(int(PATIENCE)):
        async with http.get(cluster.url + "/metrics") as reply:
            text = await reply.text()
        if any("abort" in line and line.endswith(" 1.0") for line in text.splitlines()):
            return
        await asyncio.sleep(1)
    raise AssertionError("the engine went on")


@dataclass
class Load:
    """Clients that send one request after another.

    Attributes:
        completed: the streams that ended as they should.
        interrupted: the error events that ended streams.
        failed: everything else.
    """

    url: str
    http: aiohttp.ClientSession
    completed: int = 0
    interrupted: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def clients(self, number: int, max_tokens: int) -> AsyncIterator[None]:
        """So many clients; at the end they finish their requests."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for each in range(number):
                tasks.create_task(self._client(each, max_tokens, stop))
            try:
                yield
            finally:
                stop.set()

    async def _client(self, number: int, max_tokens: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            messages = [{"role": "user", "content": f"client {number}: {self.completed}"}]
            await self._request({**CHAT, "messages": messages, "max_tokens": max_tokens})
            await asyncio.sleep(PAUSE_SECONDS)

    async def _request(self, body: dict[str, Any]) -> None:
        try:
            async with self.http.post(self.url + "/v1/chat/completions", json=body) as reply:
                text = await reply.text()
        except aiohttp.ClientError as error:
            self.failed.append(repr(error))
            return
        errors = [line for line in text.splitlines() if line.startswith('data: {"error"')]
        if reply.status != 200 or "[DONE]" not in text:
            self.failed.append(f"{reply.status} {text[-300:]}")
        elif errors:
            self.interrupted += errors
        else:
            self.completed += 1


async def test_replicas_come_and_go_under_load(
    cluster: RayCluster, http: aiohttp.ClientSession
) -> None:
    """Scaling up and down fails no request; a killed server costs its streams at most."""
    load = Load(cluster.url, http)
    [first] = cluster.servers()
    async with load.clients(CLIENTS, 40):
        await _until(lambda: len(cluster.servers()) == 2)
        assert (load.failed, load.interrupted) == ([], [])
        await _assert_same_prefix_stays_together(cluster, http)

        before = load.completed
        os.kill(first, signal.SIGKILL)
        await _until(lambda: first not in cluster.servers() and len(cluster.servers()) == 2)
    assert load.completed > before
    assert load.failed == []
    assert len(load.interrupted) <= CLIENTS
    assert all('"code":"unavailable"' in event for event in load.interrupted)

    interrupted = len(load.interrupted)
    async with load.clients(1, 1):
        await _until(lambda: len(cluster.servers()) == 1)
    assert (load.failed, len(load.interrupted)) == ([], interrupted)
    said = await asyncio.to_thread(cluster.chairlift, "status")
    assert "tiny-0: " in said.stdout


async def _assert_same_prefix_stays_together(
    cluster: RayCluster, http: aiohttp.ClientSession
) -> None:
    """One replica computes a long prompt; the other never does.

    While the router learns of a new replica, a prompt may move to it. So another prompt is tried.
    """
    tries: list[list[bool]] = []
    while len(tries) < 3 and [False, *[True] * 7] not in tries:
        tries.append(await _cached(cluster, http, f"the same beginning, {len(tries)}, "))
    assert [False, *[True] * 7] in tries, tries


async def _cached(cluster: RayCluster, http: aiohttp.ClientSession, words: str) -> list[bool]:
    """Whether each of eight prompts with the same beginning was mostly computed before."""
    cached = []
    for number in range(8):
        content = words * 30 + str(number)
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        url = cluster.url + "/v1/chat/completions"
        async with http.post(url, json={**body, "max_tokens": 1}) as reply:
            usage = (await reply.json())["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 500)
    return cached


async def _until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not await asyncio.to_thread(condition):
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(1)
