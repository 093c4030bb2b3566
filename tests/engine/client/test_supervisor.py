"""The engine process dies, hangs or does not start: requests continue, or end with an error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from support.engine.poison import POISON, poisonable_model_dir
from support.tiny import VOCAB_SIZE, tiny_model_dir

from chairlift.engine.client import supervision
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

# System: it starts and kills engine processes, and waits for hangs.
pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

CONFIG = EngineConfig(max_rows=6, max_queue=6, kv_memory=64 << 20, trust_remote_code=True)
# A step of a tiny model takes less than a hundredth of this.
TIMEOUT = 3.0
SUPERVISION = Supervision(TIMEOUT, attempts=3, backoff=0.05, longest_backoff=0.2)
LENGTH = 100
PATIENCE = 180.0
_ids = count()


class Reply(NamedTuple):
    """All outputs of a choice.

    Attributes:
        logprobs: those of the generated tokens.
        cached: the prompt tokens that came from the prefix cache.
    """

    tokens: list[int]
    finish: str | None
    error: str | None
    logprobs: list[float]
    cached: int


@dataclass
class Engine:
    """A supervised engine, the reasons of its restarts, and the statistics of its steps."""

    client: ProcessClient
    restarts: list[str] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)

    def submit(self, prompt: list[int], n: int = 1, salt: str = "", **params: Any) -> Stream:
        values = {"max_tokens": LENGTH, "seed": 3, "temperature": 0.0, **params}
        name = f"request-{next(_ids)}"
        return self.client.submit(
            Submit(name, prompt, SamplingParams(**values), n, time.monotonic(), salt)
        )

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.client.pid is not None
        os.kill(self.client.pid, number)

    async def wait_for_restarts(self, restarts: int) -> None:
        """Waits for so many or more: on a busy machine a start may take too long, and counts."""
        await until(lambda: len(self.restarts) >= restarts and self.client.unhealthy is None)

    async def begin_idle(self) -> None:
        """Waits until nothing runs, and forgets what has happened."""
        await until(lambda: self.client.unhealthy is None and self.client.unfinished == 0)
        # Its last output comes after all reports on earlier requests.
        await read(self.submit(prompt(0), max_tokens=1, salt=f"idle-{next(_ids)}"))
        self.restarts.clear()
        self.steps.clear()

    async def running(
        self, submit: Callable[[str], list[Stream]], tokens: int, watched: int | None = None
    ) -> list[Stream]:
        """Submits requests and waits until all choices have more than ``tokens`` tokens.

        Where this process is stopped for so long that one of them ends, it begins again.

        Args:
            submit: gets a salt, another one each time.
            watched: how many of the requests have to run; None is all.
        """
        while True:
            streams = submit(f"running-{next(_ids)}")
            checked = streams[:watched]
            while all(stream.unfinished == stream.request.n for stream in checked):
                if all(min(stream.progress.values()) > tokens for stream in checked):
                    return streams
                await asyncio.sleep(0.005)
            for stream in streams:
                stream.close()
            await self.begin_idle()

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
        async for batch in stream:
            for output in batch:
                outputs.setdefault(output.index, []).append(output)
    return {
        index: Reply(
            [token for output in choice for token in output.token_ids],
            choice[-1].finish,
            choice[-1].error,
            [scored.logprob for output in choice for scored in output.logprobs or ()],
            max(output.cached_tokens for output in choice),
        )
        for index, choice in outputs.items()
    }


def prompt(seed: int, length: int = 12) -> list[int]:
    return [3 + (seed * 37 + i * (seed + 5)) % 240 for i in range(length)]


def submit_mixed(engine: Engine, salt: str) -> list[Stream]:
    """Submits requests that differ in how tokens are chosen and how they end: 8 choices."""
    # NOTE: A small top_k, because rounding errors can swap neighbouring tokens of a long list.
    sampled = {"temperature": 0.9, "top_k": 6}
    constrained = {"grammar": Grammar("regex", "[a-m ]{200}"), "thinking": Thinking((60,), 30)}
    return [
        engine.submit(prompt(1), salt=salt),
        engine.submit(prompt(2), salt=salt, logprobs=2, **sampled),
        engine.submit(prompt(3), salt=salt, n=3, seed=40, **sampled),
        engine.submit(
            prompt(4), salt=salt, frequency_penalty=1.5, repetition_penalty=1.2, **sampled
        ),
        engine.submit(
            prompt(5), salt=salt, min_tokens=66, stop_token_ids=tuple(range(3, VOCAB_SIZE, 2))
        ),
        engine.submit(
            prompt(6, 300), salt=salt, logit_bias={9: 4.0, 17: 4.0}, **sampled, **constrained
        ),
    ]


def assert_same(replies: list[dict[int, Reply]], expected: list[dict[int, Reply]]) -> None:
    for choices, expected_choices in zip(replies, expected, strict=True):
        assert sorted(choices) == sorted(expected_choices)
        for index, reply in choices.items():
            other = expected_choices[index]
            assert reply._replace(logprobs=[]) == other._replace(logprobs=[])
            assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.fixture(autouse=True)
def _starts_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests, a start may take far longer than the first one did."""
    monkeypatch.setattr(supervision, "START_FACTOR", 100.0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisonable_model_dir(tmp_path_factory.mktemp("models"))


async def start_engine(path: Path, config: EngineConfig = CONFIG) -> Engine:
    source = ModelSource("tiny", "directory", path, trust_remote_code=True)
    engine = Engine(ProcessClient(config, source, "error", supervision=SUPERVISION))
    engine.client.on_restart = engine.restarts.append
    engine.client.on_step = engine.steps.append
    await engine.client.start()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_path: Path) -> AsyncIterator[Engine]:
    engine = await start_engine(model_path)
    yield engine
    await engine.client.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: Engine) -> Engine:
    await shared.begin_idle()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Engine) -> list[dict[int, Reply]]:
    return await asyncio.gather(*map(read, submit_mixed(shared, "undisturbed")))


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "crash"), (signal.SIGSTOP, "hang")]
)
async def test_streams_continue_with_the_same_tokens(
    engine: Engine, undisturbed: list[dict[int, Reply]], number: int, reason: str
) -> None:
    # Idle time does not count as a hang.
    await asyncio.sleep(1.1 * TIMEOUT if reason == "hang" else 0)
    streams = await engine.running(lambda salt: submit_mixed(engine, salt), 20, watched=3)
    engine.kill(number)
    replies = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: engine.client.unhealthy)
    assert "being restarted" in str(engine.client.unhealthy)
    late = asyncio.create_task(read(engine.submit(prompt(1), salt=reason)))
    assert_same(await asyncio.gather(*replies), undisturbed)
    assert (await late)[0].tokens == undisturbed[0][0].tokens
    assert engine.restarts == [reason]
    assert engine.client.unfinished == 0
    # Each choice is reported once, with its times in order.
    ended = [choice for stats in engine.steps for choice in stats.finished]
    assert engine.finished() == ["length"] * 8 + ["stop"]
    for choice in ended:
        assert choice.scheduled is not None
        assert choice.first_token is not None
        times = (choice.arrival, choice.scheduled, choice.first_token, choice.finished)
        assert list(times) == sorted(times)
    firsts = [seconds for stats in engine.steps for seconds in stats.first_token_latencies]
    assert len(firsts) == 9


async def test_prompt_outputs_are_sent_once_across_a_restart(engine: Engine) -> None:
    """A request that has generated tokens got its prompt's outputs from the first engine."""

    async def prompt_outputs(stream: Stream) -> list[TokenOutput]:
        outputs = [output async for batch in stream for output in batch]
        return [output for output in outputs if output.prompt_logprobs or output.embedding]

    def submit(tokens: int, **fields: Any) -> Stream:
        params = SamplingParams(max_tokens=tokens, seed=3, temperature=0.0)
        request = Submit(f"request-{next(_ids)}", prompt(8, 300), params, **fields)
        return engine.client.submit(request)

    requests: list[dict[str, Any]] = [{"prompt_logprobs": 2}, {"pooling": "mean"}]
    expected = [await prompt_outputs(submit(0, **fields)) for fields in requests]
    [running] = await engine.running(lambda salt: [submit(LENGTH, prompt_logprobs=2)], 5)
    late = [asyncio.create_task(prompt_outputs(submit(0, **fields))) for fields in requests]
    engine.kill()
    early = asyncio.create_task(prompt_outputs(running))
    for outputs, [other] in zip(
        await asyncio.gather(early, *late), [expected[0], *expected], strict=True
    ):
        [output] = outputs
        for key in ("chosen", "top"):
            if other.prompt_logprobs is not None:
                values = [
                    array("f", getattr(one.prompt_logprobs, key)).tolist()
                    for one in (output, other)
                ]
                assert values[0] == pytest.approx(values[1], abs=1e-4)
        vectors = [array("f", one.embedding or b"").tolist() for one in (output, other)]
        assert vectors[0] == pytest.approx(vectors[1], abs=1e-4)
    assert engine.restarts == ["crash"]


async def test_clients_that_leave_or_come_during_a_restart(engine: Engine) -> None:
    running = await engine.running(
        lambda salt: [engine.submit(prompt(seed), n=2, salt=salt) for seed in (1, 2)], 5
    )
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


async def test_only_the_request_that_crashes_the_engine_fails(
    engine: Engine, undisturbed: list[dict[int, Reply]]
) -> None:
    streams = await engine.running(lambda salt: submit_mixed(engine, salt), 20, watched=3)
    poisoned = asyncio.create_task(read(engine.submit(POISON)))
    replies = [asyncio.create_task(read(stream)) for stream in streams]
    assert_same(await asyncio.gather(*replies), undisturbed)
    (reply,) = (await poisoned).values()
    assert (reply.tokens, reply.finish) == ([], "error")
    assert "the engine died twice" in str(reply.error)
    # Crashes: with all requests, with all again, alone.
    assert engine.restarts == ["crash"] * 3
    # A choice that ends just as its request is withdrawn is computed again, and counts twice.
    choices, failed = Counter(length=7, stop=1), Counter(error=1)
    assert choices + failed <= Counter(engine.finished()) <= choices + choices + failed


async def test_a_single_request_fails_after_two_crashes(engine: Engine) -> None:
    reply = await read(engine.submit(POISON, n=2))
    assert [choice.finish for choice in reply.values()] == ["error", "error"]
    await engine.wait_for_restarts(2)
    assert len((await read(engine.submit(prompt(1), max_tokens=5)))[0].tokens) == 5


async def test_stored_prefixes_survive_a_restart(tmp_path: Path, tmp_path_factory: Any) -> None:
    config = EngineConfig(
        max_rows=2,
        kv_memory=16 << 20,
        prefix_cache_bytes=200 << 10,
        prefix_cache_dir=tmp_path / "prefixes",
    )
    engine = await start_engine(tiny_model_dir(tmp_path, "llama"), config)
    try:
        before = [(await read(engine.submit(prompt(s, 200), max_tokens=4)))[0] for s in range(5)]
        await until(lambda: len(list((tmp_path / "prefixes").rglob("*.safetensors"))) >= 2)
        engine.kill()
        await engine.wait_for_restarts(1)
        after = [(await read(engine.submit(prompt(s, 200), max_tokens=4)))[0] for s in range(5)]
        assert [reply.tokens for reply in after] == [reply.tokens for reply in before]
        assert max(reply.cached for reply in after) >= 128
    finally:
        await engine.client.stop()
