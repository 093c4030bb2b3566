"""Both engine clients on a tiny model: streams, stops, refusals, and the engine's death."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from mlx_lm.utils import load_model
from support.engine.client.engine_client import (
    PATIENCE,
    Client,
    _cpu_seconds,
    drained,
    request,
    tokens_of,
    until,
)
from support.engine.reference import solo_tokens
from support.tiny import VOCAB_SIZE, tiny_model_dir

from chairlift.engine.client.base import MAX_RETRY_AFTER
from chairlift.engine.client.local import LocalClient
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import EngineDead, ModelError, PromptTooLong, QueueFull
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Loading, ModelInfo, StepStats

pytestmark = pytest.mark.asyncio(loop_scope="module")

Kind = Literal["local", "process"]

CONFIG = EngineConfig(max_rows=4, max_queue=3, kv_memory=64 << 20)
CONTEXT = 4096
ROOM = 7
# More tokens than any test waits for.
ENDLESS = 3000
# The share of a core that an idle engine may use, and the seconds of the measurement.
IDLE_SHARE = 0.02
IDLE_SECONDS, IDLE_WINDOWS = 3.0, 3

PARENT = """
import asyncio, sys
from pathlib import Path
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource

async def main():
    source = ModelSource("tiny", "directory", Path(sys.argv[1]))
    client = ProcessClient(EngineConfig(kv_memory=64 << 20), source)
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def make_client(kind: Kind, path: Path) -> Client:
    source = ModelSource("tiny", "directory", path)
    if kind == "local":
        return LocalClient(CONFIG, source)
    return ProcessClient(CONFIG, source, supervision=Supervision(attempts=2, backoff=0.05))


@dataclass
class Engine:
    """A started engine, its progress while loading, and the statistics of its steps."""

    client: Client
    info: ModelInfo
    progress: list[Loading]
    steps: list[StepStats]

    async def reset(self) -> None:
        """Waits until no request runs, and clears the statistics."""
        await until(lambda: not self.steps or self.steps[-1].running == self.steps[-1].waiting == 0)
        self.steps.clear()

    def finished(self) -> list[str]:
        return [choice.reason for stats in self.steps for choice in stats.finished]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "process"])
async def started(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[Engine]:
    client = make_client(request.param, model_path)
    assert client.unhealthy == "loading the model"
    progress: list[Loading] = []
    steps: list[StepStats] = []
    client.on_step = steps.append
    try:
        yield Engine(client, await client.start(progress.append), progress, steps)
    finally:
        await client.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: Engine) -> Engine:
    await started.reset()
    return started


async def test_start_reports_progress_and_the_model(engine: Engine) -> None:
    assert any(loading.total > 0 for loading in engine.progress)
    assert engine.progress[-1] == Loading("first step")
    info = engine.info
    assert info == engine.client.info
    assert (info.architecture, info.dtype, info.vocab_size) == ("llama", "float32", VOCAB_SIZE)
    assert (info.max_context, info.max_rows, info.max_queue) == (CONTEXT, 4, 3)
    assert info.kv_limit_bytes == 64 << 20
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32
    assert info.weight_bytes > 0
    assert engine.client.unhealthy is None


async def test_greedy_tokens_equal_mlx_lms(engine: Engine, model_path: Path) -> None:
    model, _ = load_model(model_path)
    prompts = [[token % VOCAB_SIZE for token in range(3, 3 + size)] for size in (1, 5, 40, 200)]
    streams = [engine.client.submit(request(prompt, max_tokens=24)) for prompt in prompts]
    replies = await asyncio.gather(*map(drained, streams))
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = tokens_of(reply[0])
        assert tokens == solo_tokens(model, prompt, 24, tokens)
        assert [output.finish for output in reply[0]] == [None] * 23 + ["length"]


async def test_choices_share_a_prefill_and_sample_by_their_own_seeds(engine: Engine) -> None:
    prompt = list(range(10, 60))
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
    choices = await drained(engine.client.submit(request(prompt, n=3, seed=40, **sampled)))
    await until(lambda: len(engine.finished()) == 3)
    assert sum(stats.prefill_tokens for stats in engine.steps) == len(prompt)
    assert sorted(choices) == [0, 1, 2]
    for index, outputs in choices.items():
        assert outputs[-1].finish == "length"
        alone = await drained(engine.client.submit(request(prompt, seed=40 + index, **sampled)))
        assert tokens_of(outputs) == tokens_of(alone[0])
    assert len({tuple(tokens_of(outputs)) for outputs in choices.values()}) == 3


async def test_a_stop_token_ends_the_choice_and_is_counted(engine: Engine) -> None:
    complete = tokens_of((await drained(engine.client.submit(request(max_tokens=20))))[0])
    stop = complete[10]
    first = complete.index(stop)
    reply = await drained(engine.client.submit(request(max_tokens=20, stop_token_ids=(stop,))))
    assert tokens_of(reply[0]) == complete[: first + 1]
    assert (reply[0][-1].finish, reply[0][-1].ended_by_token) == ("stop", True)


async def test_closing_a_stream_frees_its_row_with_the_next_step(engine: Engine) -> None:
    stream = engine.client.submit(request(max_tokens=ENDLESS))
    outputs = aiter(stream)
    for _ in range(5):
        await anext(outputs)
    stream.close()
    stream.close()  # harmless
    assert stream.unfinished == 0
    await until(engine.finished)
    (report,) = [stats for stats in engine.steps if stats.finished]
    assert [choice.reason for choice in report.finished] == ["abort"]
    assert report.finished[0].generated_tokens < ENDLESS
    assert (report.running, report.rows, report.kv_used_bytes) == (0, 0, 0)
    assert report is engine.steps[-1]
    assert {output.finish async for batch in outputs for output in batch} <= {None}


@pytest.mark.slow
async def test_a_stopped_choice_counts_as_stop_and_the_other_continues(
    engine: Engine,
) -> None:
    stream = engine.client.submit(request(n=2, max_tokens=300))
    indices = []
    async with asyncio.timeout(PATIENCE):
        async for outputs in stream:
            if not indices:
                stream.stop(0)
            indices += [output.index for output in outputs]
            last = outputs[-1]
    assert (last.index, last.finish) == (1, "length")
    assert indices.count(1) == 300
    await until(lambda: len(engine.finished()) == 2)
    assert engine.finished() == ["stop", "length"]
    stopped = next(choice for stats in engine.steps for choice in stats.finished)
    assert stopped.generated_tokens < 300


@pytest.mark.slow
async def test_a_prompt_too_long_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=str(CONTEXT)):
        engine.client.submit(request([5] * (CONTEXT - 7), max_tokens=8))
    reply = await drained(engine.client.submit(request([5] * (CONTEXT - 8), max_tokens=8)))
    assert len(tokens_of(reply[0])) == 8


async def test_a_full_queue_refuses_until_there_is_room(engine: Engine) -> None:
    streams = [engine.client.submit(request(max_tokens=ENDLESS)) for _ in range(ROOM - 2)]
    streams.append(engine.client.submit(request(n=2, max_tokens=ENDLESS)))
    with pytest.raises(QueueFull, match=f"{ROOM} is the limit") as refusal:
        engine.client.submit(request())
    assert 1 <= refusal.value.retry_after <= MAX_RETRY_AFTER
    assert f"about {refusal.value.retry_after} s" in str(refusal.value)
    await until(lambda: engine.steps and engine.steps[-1].running == 4)
    assert engine.steps[-1].waiting == 3
    streams[0].close()
    with pytest.raises(QueueFull):
        engine.client.submit(request(n=2))
    late = engine.client.submit(request(max_tokens=4))
    for stream in streams:
        stream.close()
    assert len(tokens_of((await drained(late))[0])) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "process"])
async def test_a_broken_model_is_a_one_line_error(
    kind: Kind, model_path: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_path, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    client = make_client(kind, broken)
    with pytest.raises(ModelError) as error:
        await client.start()
    assert str(broken) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(EngineDead):
        client.submit(request())
    await client.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "process"])
async def test_stopping_ends_open_streams_and_leaves_nothing_behind(
    kind: Kind, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not tmp_path: the path of a local socket must be short.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        client = make_client(kind, model_path)
        await client.start()
        outputs = aiter(client.submit(request(max_tokens=ENDLESS)))
        await anext(outputs)
        await client.stop()
        with pytest.raises(EngineDead):
            async for _ in outputs:
                pass
        assert os.listdir(folder) == []
    await client.stop()  # harmless


@pytest.mark.slow
async def test_every_stream_fails_if_the_engine_cannot_be_restarted(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client("process", model_path)
    await client.start()
    assert client.unhealthy is None
    death = asyncio.create_task(client.died())
    streams = [
        client.submit(request(max_tokens=ENDLESS)) for _ in range(6)
    ]  # two of them are queued
    await anext(aiter(streams[0]))
    assert not death.done()
    assert isinstance(client, ProcessClient)
    assert client.pid is not None
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDead, match="exit code 1"):
            await drained(stream)
    assert "started 2 times in vain" in await asyncio.wait_for(death, PATIENCE)
    assert "exit code 1" in str(client.unhealthy)
    with pytest.raises(EngineDead, match="exit code 1"):
        client.submit(request())
    await client.stop()


@pytest.mark.slow
async def test_an_engine_process_that_cannot_start_is_reported(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    client = make_client("process", model_path)
    with pytest.raises(EngineDead, match="exit code 1"):
        await asyncio.wait_for(client.start(), PATIENCE)
    await client.stop()


@pytest.mark.slow
async def test_the_engine_process_ends_with_its_parent_and_leaves_nothing_behind(
    model_path: Path,
) -> None:
    # Not tmp_path: the path of a local socket must be short.
    with tempfile.TemporaryDirectory() as folder:
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PARENT, str(model_path)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        )
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(parent.stdout.readline(), PATIENCE))
        os.kill(pid, 0)
        parent.kill()
        await parent.wait()
        # The engine has inherited the pipe, which closes when the engine ends.
        try:
            await asyncio.wait_for(parent.stdout.read(), PATIENCE)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the engine outlived its parent")
        assert os.listdir(folder) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
async def test_an_idle_engine_process_uses_no_cpu(model_path: Path) -> None:
    client = make_client("process", model_path)
    await client.start()
    await drained(client.submit(request(max_tokens=20)))
    assert isinstance(client, ProcessClient)
    used = []
    try:
        # What its start has left to do may still take time in the first of these.
        for _ in range(IDLE_WINDOWS):
            before = _cpu_seconds(client.pid)
            await asyncio.sleep(IDLE_SECONDS)
            used.append(_cpu_seconds(client.pid) - before)
            if used[-1] < IDLE_SHARE * IDLE_SECONDS:
                return
    finally:
        await client.stop()
    raise AssertionError(used)
