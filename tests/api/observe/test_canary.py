"""The canary finds rows whose tokens differ without a batch, and delays no user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.api.api_server import until
from support.engine.adapters import matrices, write_mlx
from support.engine.bench import Bench
from support.tiny import tiny_model, tiny_model_dir

from chairlift.api.observe.canary import ATTEMPTS, MAX_TOKENS, POLL_SECONDS, Canary, FinishedRow
from chairlift.engine.client.interface import TokenStream
from chairlift.engine.client.local import LocalClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import REQUEST_ID
from chairlift.engine.messages import SamplingParams, StepStats, Submit
from chairlift.metrics.recorder import Recorder

INTERVAL = 0.05
PROMPT = list(range(5, 60))
# Statistics that count users' requests only.
USER_COUNTS = (
    *("running", "waiting", "finished", "prefill_tokens", "decode_tokens", "prefix_queries"),
    *("first_token_latencies", "inter_token_latencies"),
)


def request(name: str, n: int = 1, prompt: list[int] = PROMPT, **params: Any) -> Submit:
    given = {"max_tokens": 8, "seed": 3, "temperature": 0.0, **params}
    return Submit(name, prompt, SamplingParams(**given), n, time.monotonic())


async def tokens_of(stream: TokenStream) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for outputs in stream:
        for output in outputs:
            tokens.setdefault(output.index, []).extend(output.token_ids)
    stream.close()
    return tokens


class WatchedEngine:
    """A real engine with a canary.

    Attributes:
        steps: the engine's statistics of each step.
        sent: the requests that the engine was given.
    """

    def __init__(self, client: LocalClient) -> None:
        self.client = client
        self.recorder = Recorder("1.2")
        self.canary = Canary(client, self.recorder, INTERVAL)
        self.steps: list[StepStats] = []
        self.sent: list[Submit] = []
        client.on_step = self.steps.append
        send = client.send

        def record(message: Any) -> None:
            if isinstance(message, Submit):
                self.sent.append(message)
            send(message)

        client.send = record  # type: ignore[method-assign]

    def count(self, what: str) -> float:
        value = self.recorder.registry.get_sample_value(f"chairlift_canary_rows_{what}_total")
        assert value is not None
        return value

    @property
    def replays(self) -> list[Submit]:
        return [request for request in self.sent if request.replay]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@asynccontextmanager
async def watched_engine(model: Path) -> AsyncIterator[WatchedEngine]:
    config = EngineConfig(max_rows=4, max_queue=1, kv_memory=64 << 20)
    client = LocalClient(config, ModelSource("tiny", "directory", model))
    await client.start()
    engine = WatchedEngine(client)
    running = asyncio.create_task(engine.canary.run())
    try:
        yield engine
    finally:
        running.cancel()
        await asyncio.wait([running])
        await client.stop()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "n": 3, "logprobs": 2}]
)
async def test_a_row_from_a_batch_equals_its_replay(model: Path, params: dict[str, Any]) -> None:
    async with watched_engine(model) as engine:
        await until(lambda: engine.canary._row_future)
        n = params.pop("n", 1)
        requests = [
            request(f"r{i}", n, PROMPT[i:], seed=i, **params) for i in range(4 if n == 1 else 1)
        ]
        tokens = await asyncio.gather(*(tokens_of(engine.canary.submit(each)) for each in requests))
        await until(lambda: engine.count("checked"))
        assert engine.count("diverged") == 0
        (replay,) = engine.replays
        number, original = next(
            (i, each) for i, each in enumerate(requests) if each.prompt == replay.prompt
        )
        by_seed = {original.params.seed + i: row for i, row in tokens[number].items()}
        assert replay.params.max_tokens == len(by_seed[replay.params.seed])


async def test_a_different_token_is_counted_and_logged_with_its_position(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched_engine(model) as engine:
        submit = engine.client.submit

        def tampered(request: Submit) -> TokenStream:
            # Simulates a batch that changed the sixth token: the replay must not choose it.
            if request.replay:
                params = replace(request.params, logit_bias={row[5]: -100.0})
                request = replace(request, params=params)
            return submit(request)

        row: list[int] = (await tokens_of(submit(request("first"))))[0]
        engine.client.submit = tampered  # type: ignore[method-assign, assignment]
        await until(lambda: engine.canary._row_future)
        REQUEST_ID.set("theirs")
        await tokens_of(engine.canary.submit(request("second")))
        await until(lambda: engine.count("checked"))
        assert engine.count("diverged") == 1
        (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert line.__dict__["position"] == row.index(row[5])
        assert line.__dict__["request_id"] == "theirs"
        assert line.__dict__["prompt_tokens"] == len(PROMPT)


async def test_a_replay_is_in_no_user_metric_and_leaves_no_prefix(model: Path) -> None:
    async with watched_engine(model) as engine:
        await until(lambda: engine.canary._row_future)
        await tokens_of(engine.canary.submit(request("theirs")))
        steps = len(engine.steps)
        await until(lambda: engine.count("checked"))
        await until(lambda: not engine.steps[-1].kv_used_bytes)
        replay = engine.steps[steps:]
        assert sum(stats.rows for stats in replay) > 0
        # The user's row leaves with the first of these steps.
        prefix = replay[0].prefix_bytes
        assert prefix > 0
        for stats in replay:
            counted = msgspec.structs.asdict(stats)
            assert not any(counted[name] for name in USER_COUNTS)
            assert stats.prefix_bytes == prefix


@pytest.mark.slow
async def test_a_replay_gives_way_to_users_and_takes_no_place_in_the_queue(model: Path) -> None:
    async with watched_engine(model) as engine:
        await until(lambda: engine.canary._row_future)
        await tokens_of(engine.canary.submit(request("theirs", max_tokens=MAX_TOKENS)))
        for attempt in range(ATTEMPTS):
            await until(lambda number=attempt + 1: len(engine.replays) == number)
            engine.client.check_room(5, 0)
            # Users get all rows and the whole queue, though a replay was running.
            streams = [engine.canary.submit(request(f"r{attempt}-{i}")) for i in range(5)]
            assert engine.client.unfinished == 5
            await asyncio.gather(*map(tokens_of, streams))
        # The canary gives up on that row and waits for another one.
        await until(lambda: engine.canary._row_future and not engine.canary._row_future.done())
        assert engine.count("checked") == 0
        await tokens_of(engine.canary.submit(request("short")))
        await until(lambda: engine.count("checked"))


async def test_an_aborted_row_is_not_replayed_and_the_next_row_is(model: Path) -> None:
    async with watched_engine(model) as engine:
        await until(lambda: engine.canary._row_future)
        leaves = engine.canary.submit(request("leaves", max_tokens=500))
        async for _ in leaves:
            break
        leaves.close()
        await until(lambda: not engine.client.unfinished)
        await tokens_of(engine.canary.submit(request("stays", prompt=[7, 8, 9])))
        await until(lambda: engine.count("checked"))
        assert [replay.prompt for replay in engine.replays] == [[7, 8, 9]]


async def test_a_replay_waits_until_no_user_runs(model: Path) -> None:
    async with watched_engine(model) as engine:
        await until(lambda: engine.canary._row_future)
        others = engine.client.submit(request("others", max_tokens=2000))
        busy = asyncio.create_task(tokens_of(others))
        await tokens_of(engine.canary.submit(request("theirs")))
        assert engine.canary._row_future is not None
        await asyncio.sleep(3 * POLL_SECONDS)
        assert not busy.done()
        assert not engine.replays
        busy.cancel()
        others.close()
        await until(lambda: engine.count("checked"))


def test_a_recorded_row_is_bounded() -> None:
    assert FinishedRow(request("a"), "id", 0, [1, 2]).divergence([1, 2]) is None
    row = FinishedRow(request("a", max_tokens=10**6), "id", 0, [5] * MAX_TOKENS)
    replay = row.replay()
    assert replay.params.max_tokens == MAX_TOKENS
    assert row.divergence([5] * (MAX_TOKENS - 1)) == MAX_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_a_preempted_replay_does_not_count_as_a_preemption(swap: int) -> None:
    model = tiny_model("llama", seed=2)
    measured = Bench(model)
    kv = 500 * measured.core.limits.geometry.bytes_per_token
    for replayed in (False, True):
        bench = Bench(model, kv=kv, swap=swap)
        bench.core.submit(request("user", max_tokens=150))
        second = request("second", max_tokens=150)
        bench.core.submit(replace(second, priority=1, replay=replayed))
        bench.drain()
        assert (sum(stats.preemptions for stats in bench.stats) == 0) == replayed
        assert len(bench.finished) == (1 if replayed else 2)
        assert bench.tokens("user") == bench.tokens("second")


async def test_a_row_whose_adapter_is_unloaded_is_not_replayed(model: Path, tmp_path: Path) -> None:
    folder = write_mlx(tmp_path, matrices(tiny_model("llama"), 1))
    async with watched_engine(model) as engine:
        adapters = engine.client.adapters
        key = (await adapters.load("a", str(folder))).key
        for unloads in (False, True):
            await until(lambda: engine.canary._row_future)
            recorded = engine.canary._row_future
            beside = engine.client.submit(request("beside", max_tokens=1000))
            await tokens_of(engine.canary.submit(replace(request("0"), adapter=key)))
            if unloads:
                adapters.unload("a")
            beside.close()
            await until(lambda first=recorded: engine.canary._row_future not in (None, first))
        assert [replay.adapter for replay in engine.replays] == [key]
        assert engine.count("checked") == 1
        assert not adapters.has(key)
