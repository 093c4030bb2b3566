"""The engine process dies, hangs, or does not start: requests go on, or end, as they should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from support.engine.poison import POISON, poisonable_model_dir
from support.tiny import VOCAB_SIZE, tiny_model_dir

from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import QueueFull
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import (
    Grammar,
    SamplingParams,
    StepStats,
    Submit,
    Thinking,
    TokenOutput,
)
from chairlift.loadtest.faults.server import FaultServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(max_rows=6, max_queue=6, kv_memory=64 << 20, trust_remote_code=True)
# No step of a tiny model takes a hundredth of this.
TIMEOUT = 3.0
SUPERVISION = Supervision(TIMEOUT, attempts=3, backoff=0.05, longest_backoff=0.2)
LENGTH = 150
PATIENCE = 60.0
_ids = count()


class Reply(NamedTuple):
    """All that a choice's stream has told."""

    tokens: list[int]
    finish: str | None
    error: str | None
    logprobs: list[float]
    cached: int


@dataclass
class Engine:
    """A supervised engine, and what it has reported."""

    client: ProcessClient
    restarts: list[str] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)

    def submit(self, prompt: list[int], n: int = 1, salt: str = "", **params: Any) -> Stream:
        given = {"max_tokens": LENGTH, "seed": 3, "temperature": 0.0, **params}
        name = f"request-{next(_ids)}"
        return self.client.submit(
            Submit(name, prompt, SamplingParams(**given), n, time.monotonic(), salt)
        )

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.client.pid is not None
        os.kill(self.client.pid, number)

    async def serving(self, restarts: int) -> None:
        await until(lambda: len(self.restarts) == restarts and self.client.unhealthy is None)

    def finished(self) -> list[str]:
        return sorted(choice.reason for stats in self.steps for choice in stats.finished)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def read(stream: Stream) -> dict[int, Reply]:
    outputs: dict[int, list[TokenOutput]] = {}
    async with asyncio.timeout(PATIENCE):
        async for arrived in stream:
            for output in arrived:
                outputs.setdefault(output.index, []).append(output)
    return {
        index: Reply(
            [token for output in got for token in output.token_ids],
            got[-1].finish,
            got[-1].error,
            [scored.logprob for output in got for scored in output.logprobs or ()],
            max(output.cached_tokens for output in got),
        )
        for index, got in outputs.items()
    }


def prompt(seed: int, length: int = 12) -> list[int]:
    return [3 + (seed * 37 + i * (seed + 5)) % 240 for i in range(length)]


def of_every_kind(engine: Engine, salt: str) -> list[Stream]:
    """Requests whose ways to choose tokens and to end are different; they are 8 choices."""
    # Of few tokens: two that are next to each other in a long row differ by rounding errors.
    drawn = {"temperature": 0.9, "top_k": 6}
    held = {"grammar": Grammar("regex", "[a-m ]{200}"), "thinking": Thinking((60,), 30)}
    return [
        engine.submit(prompt(1), salt=salt),
        engine.submit(prompt(2), salt=salt, logprobs=2, **drawn),
        engine.submit(prompt(3), salt=salt, n=3, seed=40, **drawn),
        engine.submit(prompt(4), salt=salt, frequency_penalty=1.5, repetition_penalty=1.2, **drawn),
        engine.submit(
            prompt(5), salt=salt, min_tokens=100, stop_token_ids=tuple(range(3, VOCAB_SIZE, 2))
        ),
        engine.submit(prompt(6, 300), salt=salt, logit_bias={9: 4.0, 17: 4.0}, **drawn, **held),
    ]


def assert_same(replies: list[dict[int, Reply]], expected: list[dict[int, Reply]]) -> None:
    for got, wanted in zip(replies, expected, strict=True):
        assert sorted(got) == sorted(wanted)
        for index, reply in got.items():
            assert reply._replace(logprobs=[]) == wanted[index]._replace(logprobs=[])
            assert reply.logprobs == pytest.approx(wanted[index].logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisonable_model_dir(tmp_path_factory.mktemp("models"))


async def started(path: Path, config: EngineConfig = CONFIG) -> Engine:
    source = ModelSource("tiny", "directory", path, trust_remote_code=True)
    engine = Engine(ProcessClient(config, source, "error", supervision=SUPERVISION))
    engine.client.on_restart = engine.restarts.append
    engine.client.on_step = engine.steps.append
    await engine.client.start()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_path: Path) -> AsyncIterator[Engine]:
    engine = await started(model_path)
    yield engine
    await engine.client.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: Engine) -> Engine:
    await until(lambda: shared.client.unhealthy is None)
    shared.restarts.clear()
    shared.steps.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Engine) -> list[dict[int, Reply]]:
    return await asyncio.gather(*map(read, of_every_kind(shared, "undisturbed")))


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "crash"), (signal.SIGSTOP, "hang")]
)
async def test_streams_go_on_with_the_same_tokens(
    engine: Engine, undisturbed: list[dict[int, Reply]], number: int, reason: str
) -> None:
    await asyncio.sleep(1.1 * TIMEOUT if reason == "hang" else 0)  # an idle engine does not hang
    streams = of_every_kind(engine, reason)
    replies = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: min(min(stream.progress.values()) for stream in streams[:3]) > 20)
    engine.kill(number)
    await until(lambda: engine.client.unhealthy)
    assert "being restarted" in str(engine.client.unhealthy)
    late = asyncio.create_task(read(engine.submit(prompt(1), salt=reason)))
    assert_same(await asyncio.gather(*replies), undisturbed)
    assert (await late)[0].tokens == undisturbed[0][0].tokens
    assert engine.restarts == [reason]
    assert engine.client.unfinished == 0
    # Each is reported once, and its times are in their order.
    ended = [choice for stats in engine.steps for choice in stats.finished]
    assert engine.finished() == ["length"] * 8 + ["stop"]
    for choice in ended:
        assert choice.scheduled is not None
        assert choice.first_token is not None
        times = (choice.arrival, choice.scheduled, choice.first_token, choice.finished)
        assert list(times) == sorted(times)
    firsts = [seconds for stats in engine.steps for seconds in stats.first_token_latencies]
    assert len(firsts) == 9


async def test_what_is_asked_of_prompts_is_told_once_and_alike(engine: Engine) -> None:
    """By whichever engine; one that had begun to speak was told of its prompt before."""

    async def told(stream: Stream) -> list[TokenOutput]:
        outputs = [output async for arrived in stream for output in arrived]
        return [output for output in outputs if output.prompt_logprobs or output.embedding]

    def asked(tokens: int, **reading: Any) -> Stream:
        params = SamplingParams(max_tokens=tokens, seed=3, temperature=0.0)
        submit = Submit(f"request-{next(_ids)}", prompt(8, 300), params, **reading)
        return engine.client.submit(submit)

    readings: list[dict[str, Any]] = [{"prompt_logprobs": 2}, {"pooling": "mean"}]
    expected = [await told(asked(0, **reading)) for reading in readings]
    begun = asked(LENGTH, prompt_logprobs=2)
    spoken = asyncio.create_task(told(begun))
    await until(lambda: begun.progress[0] > 5)
    late = [asyncio.create_task(told(asked(0, **reading))) for reading in readings]
    engine.kill()
    for ours, [wanted] in zip(
        await asyncio.gather(spoken, *late), [expected[0], *expected], strict=True
    ):
        [output] = ours
        for key in ("chosen", "top"):
            if wanted.prompt_logprobs is not None:
                values = [
                    array("f", getattr(one.prompt_logprobs, key)).tolist()
                    for one in (output, wanted)
                ]
                assert values[0] == pytest.approx(values[1], abs=1e-4)
        vectors = [array("f", one.embedding or b"").tolist() for one in (output, wanted)]
        assert vectors[0] == pytest.approx(vectors[1], abs=1e-4)
    assert engine.restarts == ["crash"]


async def test_clients_that_leave_or_come_during_a_restart(engine: Engine) -> None:
    running = [engine.submit(prompt(seed), n=2) for seed in (1, 2)]
    await until(lambda: all(len(stream.progress) == 2 for stream in running))
    await until(lambda: all(min(stream.progress.values()) > 5 for stream in running))
    engine.kill()
    await until(lambda: engine.client.unhealthy)
    running[0].close()
    running[1].stop(0)
    assert engine.finished() == ["abort", "abort", "stop"]
    assert (engine.steps[-1].running, engine.steps[-1].waiting) == (0, 1)
    waiting = [engine.submit(prompt(seed), max_tokens=4) for seed in range(11)]
    with pytest.raises(QueueFull, match="12 is the limit"):
        engine.submit(prompt(1))
    rest, *replies = await asyncio.gather(*map(read, [running[1], *waiting]))
    assert len(rest[1].tokens) == LENGTH
    assert all(len(reply[0].tokens) == 4 for reply in replies)
    assert engine.client.unfinished == 0


async def test_what_brings_the_engine_down_ends_alone(
    engine: Engine, undisturbed: list[dict[int, Reply]]
) -> None:
    streams = of_every_kind(engine, "poison")
    replies = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: min(stream.progress[0] for stream in streams[:3]) > 20)
    poisoned = asyncio.create_task(read(engine.submit(POISON)))
    assert_same(await asyncio.gather(*replies), undisturbed)
    (reply,) = (await poisoned).values()
    assert (reply.tokens, reply.finish) == ([], "error")
    assert "the engine died twice" in str(reply.error)
    # With all, with all again, alone.
    assert engine.restarts == ["crash"] * 3
    assert engine.finished() == ["error"] + ["length"] * 7 + ["stop"]


async def test_alone_it_takes_two_deaths(engine: Engine) -> None:
    reply = await read(engine.submit(POISON, n=2))
    assert [choice.finish for choice in reply.values()] == ["error", "error"]
    await engine.serving(restarts=2)
    assert len((await read(engine.submit(prompt(1), max_tokens=5)))[0].tokens) == 5


async def test_prefixes_on_disk_come_back(tmp_path: Path, tmp_path_factory: Any) -> None:
    config = EngineConfig(
        max_rows=2,
        kv_memory=16 << 20,
        prefix_cache_bytes=200 << 10,
        prefix_cache_dir=tmp_path / "prefixes",
    )
    engine = await started(tiny_model_dir(tmp_path, "llama"), config)
    try:
        before = [(await read(engine.submit(prompt(s, 200), max_tokens=4)))[0] for s in range(5)]
        await until(lambda: len(list((tmp_path / "prefixes").rglob("*.safetensors"))) >= 2)
        engine.kill()
        await engine.serving(restarts=1)
        after = [(await read(engine.submit(prompt(s, 200), max_tokens=4)))[0] for s in range(5)]
        assert [reply.tokens for reply in after] == [reply.tokens for reply in before]
        assert max(reply.cached for reply in after) >= 128
    finally:
        await engine.client.stop()


# The server


def stream_events(url: str) -> list[dict[str, Any]]:
    """A long stream's events, to its end."""
    body = {"prompt": "ab", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        lines = [line.decode().strip() for line in reply]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_a_server_whose_engine_does_not_start_again_says_so_and_ends(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    flags = ("--engine-start-attempts", "2")
    async with FaultServer(model, *flags, while_starting=kill_engine) as server:
        assert await server.metric("chairlift_engine_restarts_total", reason="start") == 1
        events = asyncio.create_task(asyncio.to_thread(stream_events, server.spec.base_url))
        await asyncio.sleep(0.5)
        (model / "config.json").unlink()
        await server.signal_engine(signal.SIGKILL)
        said = []
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                said.append(await server.health())
                await asyncio.sleep(0.05)
        reasons = {health.reason for health in said if health.status == 503}
        assert any("being restarted: the engine process ended with signal 9" in r for r in reasons)
        assert any("has no config.json" in r for r in reasons)
        (*_, last) = await events
        assert "has no config.json" in last["error"]["message"]
        assert await server.exit_code() == 1


async def kill_engine(server: FaultServer) -> None:
    await server.signal_engine(signal.SIGKILL)
