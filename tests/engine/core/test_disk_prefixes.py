"""Prefixes on disk in the engine: read while other requests run, and counted."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api.fake_engine import model_info
from support.engine.bench import Bench
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
from support.tiny import TinyKind, tiny_model, tiny_model_dir

from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.store import files as store_files
from chairlift.engine.client.local import LocalClient
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Abort, StepStats
from chairlift.metrics.recorder import Recorder

PREFIX_BYTES = 1 << 26
MODEL = tiny_model("llama", seed=5)


def _tokens(seed: int, count: int = 70) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(3, 250) for _ in range(count)]


PROMPTS = [_tokens(i) for i in range(4)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory that stores the prefixes of ``PROMPTS``, one file each."""
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=tmp_path, tokens=100)
    for i, prompt in enumerate(PROMPTS):
        bench.submit(str(i), prompt, 1)
        bench.drain()
    bench.core.close(10)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(PROMPTS)
    return tmp_path


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that all reads of stored prefixes wait for."""
    opened, read = threading.Event(), store_files.read_node

    def slowly(*args: Any) -> Any:
        assert opened.wait(PATIENCE)
        return read(*args)

    monkeypatch.setattr(store_files, "read_node", slowly)
    yield opened
    opened.set()


def _step_until(bench: Bench, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        if bench.core.idle:
            time.sleep(0.001)
        else:
            bench.step()


def _cached(bench: Bench, name: str, index: int = 0) -> int:
    return bench.outputs[name, index][0].cached_tokens


def test_other_requests_run_while_a_prefix_is_read(saved: Path, gate: threading.Event) -> None:
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=saved)
    other = _tokens(9)
    bench.submit("running", _tokens(8), 30)
    bench.step()
    bench.submit("waits", PROMPTS[0], 6)
    bench.submit("behind", other, 6)
    _step_until(bench, lambda: len(bench.finished) == 2)
    assert ("waits", 0) not in bench.outputs
    _step_until(bench, lambda: bench.core.idle)
    assert [sequence.request_id for sequence in bench.core.scheduler.waiting] == ["waits"]
    gate.set()
    bench.drain()
    assert bench.tokens("waits") == solo_tokens(MODEL, PROMPTS[0], 6)
    assert bench.tokens("behind") == solo_tokens(MODEL, other, 6)
    assert (_cached(bench, "waits"), _cached(bench, "behind")) == (len(PROMPTS[0]) - 1, 0)
    bench.core.close(10)


@pytest.mark.parametrize("forked", [False, True])
def test_aborting_a_waiting_request_cancels_its_reads(
    saved: Path, gate: threading.Event, forked: bool
) -> None:
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=saved, rows=2)
    n = 3 if forked else 1  # more choices than rows are queued one by one
    bench.submit("goes", PROMPTS[0], 6, n=n)
    bench.submit("stays", PROMPTS[1], 6, n=n)
    bench.submit("goes too", PROMPTS[2], 6)
    assert bench.core.idle
    bench.core.abort(Abort("goes too"))
    bench.core.abort(Abort("goes"))
    bench.step()
    assert [choice.reason for choice in bench.finished] == ["abort"] * (n + 1)
    assert bench.core.idle
    gate.set()
    bench.drain()
    for index in range(n):
        assert bench.tokens("stays", index) == solo_tokens(MODEL, PROMPTS[1], 6)
        assert _cached(bench, "stays", index) == len(PROMPTS[1]) - 1
    # The prefix of "stays", and that of "goes" only if its read had begun.
    assert sum(stats.store_files["read"] for stats in bench.stats) in (1, 2)
    assert bench.core.prefixes._tree.match(PROMPTS[0]).length == 0
    bench.core.close(10)


def test_aborting_one_choice_keeps_the_prefix_for_the_others(
    saved: Path, gate: threading.Event
) -> None:
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=saved, rows=2)
    bench.submit("three", PROMPTS[0], 6, n=3)
    bench.core.abort(Abort("three", 1))
    gate.set()
    bench.drain()
    for index in (0, 2):
        assert bench.tokens("three", index) == solo_tokens(MODEL, PROMPTS[0], 6)
        assert _cached(bench, "three", index) == len(PROMPTS[0]) - 1
    bench.core.close(10)


def test_a_prefix_that_several_requests_need_is_read_once(saved: Path) -> None:
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=saved)
    for i in range(5):
        bench.submit(str(i), [*PROMPTS[i % 2], 5 + i, 6], 4)
    bench.drain()
    for i in range(5):
        prompt = [*PROMPTS[i % 2], 5 + i, 6]
        assert bench.tokens(str(i)) == solo_tokens(MODEL, prompt, 4)
        assert _cached(bench, str(i)) >= len(PROMPTS[0])
    assert sum(stats.store_files["read"] for stats in bench.stats) == 2
    bench.core.close(10)


@pytest.mark.parametrize("error", [SavedStateError("it is broken"), MemoryError("none left")])
def test_a_read_that_fails_is_a_miss(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(store_files, "read_node", fail)
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=saved)
    bench.submit("a", PROMPTS[0], 6)
    bench.drain()
    assert bench.tokens("a") == solo_tokens(MODEL, PROMPTS[0], 6)
    assert _cached(bench, "a") == 0
    bench.core.close(10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_random_traffic_over_a_slow_disk_gives_the_solo_tokens(
    kind: TinyKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds only a few prefixes, so that they are evicted and read again, with aborts."""
    model = tiny_model(kind, seed=7)
    random_, read = random.Random(3), store_files.read_node

    def slowly(*args: Any) -> Any:
        time.sleep(0.005)
        return read(*args)

    monkeypatch.setattr(store_files, "read_node", slowly)
    bench = Bench(model, prefix=150_000, directory=tmp_path)
    trunks = [_tokens(i, 66) for i in range(6)]
    requests: dict[str, tuple[list[int], int]] = {}
    for i in range(50):
        prompt = [*random_.choice(trunks), *_tokens(100 + i, 1 + i % 5)]
        requests[str(i)] = prompt, random_.randrange(1, 6)
        bench.submit(str(i), *requests[str(i)])
        if i % 6 == 5:
            bench.submit(f"leaves {i}", random_.choice(trunks), 30)
            bench.step()
            bench.core.abort(Abort(f"leaves {i}"))
        for _ in range(random_.randrange(6)):
            bench.step()
    bench.drain()
    for name, (prompt, count) in requests.items():
        assert bench.tokens(name) == solo_tokens(model, prompt, count, bench.tokens(name)), name
    assert sum(stats.store_files["read"] for stats in bench.stats) > 0
    bench.core.close(10)


def test_store_statistics_are_reported_without_new_requests(tmp_path: Path) -> None:
    bench = Bench(MODEL, prefix=70_000, directory=tmp_path)
    for i, prompt in enumerate(PROMPTS):
        bench.submit(str(i), prompt, 4)
        bench.drain()
    store = bench.core.prefixes._store
    assert store is not None
    assert store.flush(10)
    bench.drain()
    assert sum(stats.store_files["written"] for stats in bench.stats) == store.stats.written > 0
    assert bench.stats[-1].store_bytes == {"disk": store.nbytes, "queue": 0}
    bench.submit("again", PROMPTS[0], 4)
    bench.drain()
    assert store.flush(10)
    bench.drain()
    assert bench.core.idle
    recorder = Recorder("1.2")
    recorder.model_loaded("m", model_info())
    for stats in bench.stats:
        recorder.record_step(stats)

    def value(name: str, **labels: str) -> float | None:
        return recorder.registry.get_sample_value(f"chairlift_prefix_store_{name}", labels)

    files = list(tmp_path.glob("*.safetensors"))
    assert value("files_total", event="written") == store.stats.written == len(files) > 0
    assert value("files_total", event="read") == store.stats.read > 0
    for event in ("dropped", "failed", "evicted", "broken"):
        assert value("files_total", event=event) == 0
    nbytes = sum(path.stat().st_size for path in files)
    assert value("io_bytes_total", direction="written") == value("bytes", place="disk") == nbytes
    assert value("io_bytes_total", direction="read") == store.stats.read_bytes > 0
    assert value("read_seconds_total") == pytest.approx(store.stats.read_seconds)
    assert value("bytes", place="queue") == 0
    bench.core.close(10)


def test_the_first_step_reports_the_files_found_at_start(saved: Path) -> None:
    files = sorted(saved.glob("*.safetensors"))
    files[0].write_bytes(b"broken")
    bench = Bench(MODEL, prefix=PREFIX_BYTES, directory=saved)
    assert bench.core.idle
    bench.submit("a", _tokens(9), 1)
    bench.step()
    assert bench.stats[0].store_files["broken"] == 1
    assert bench.stats[0].store_bytes["disk"] == sum(file.stat().st_size for file in files[1:])
    bench.core.close(10)


def _client(kind: str, folder: Path) -> tuple[Client, list[StepStats]]:
    """An engine with memory for one prompt of 300 tokens, and its statistics."""
    if not (folder / "tiny-llama").exists():
        tiny_model_dir(folder, "llama")
    config = EngineConfig(
        max_rows=4,
        kv_memory=64 << 20,
        prefix_cache_bytes=200_000,
        prefix_cache_dir=folder / "prefixes",
    )
    source = ModelSource("tiny", "directory", folder / "tiny-llama")
    client = LocalClient(config, source) if kind == "local" else ProcessClient(config, source)
    steps: list[StepStats] = []
    client.on_step = steps.append
    return client, steps


async def test_an_idle_engine_wakes_when_files_have_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, write = threading.Event(), store_files.write_node

    def slowly(*args: Any) -> int:
        assert opened.wait(PATIENCE)
        return write(*args)

    monkeypatch.setattr(store_files, "write_node", slowly)
    client, steps = _client("local", tmp_path)
    await client.start()
    for i in range(3):
        await drained(client.submit(request(_tokens(i, 300))))
    await until(lambda: steps[-1].store_bytes["queue"] and not steps[-1].running)
    opened.set()
    await until(lambda: steps[-1].store_bytes["disk"] and not steps[-1].store_bytes["queue"])
    assert sum(stats.store_files["written"] for stats in steps) > 0
    await client.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "process"])
async def test_an_idle_engine_wakes_when_a_prefix_has_been_read(kind: str, tmp_path: Path) -> None:
    prompts = [_tokens(i, 300) for i in range(4)]
    first, steps = _client(kind, tmp_path)
    await first.start()
    replies = [await drained(first.submit(request(prompt))) for prompt in prompts]
    await first.stop()

    second, steps = _client(kind, tmp_path)
    await second.start()
    for prompt, reply in zip(prompts, replies, strict=True):
        again = await drained(second.submit(request(prompt)))
        assert tokens_of(again[0]) == tokens_of(reply[0])
        assert again[0][0].cached_tokens == len(prompt) - 1
    await until(lambda: sum(stats.store_files["read"] for stats in steps) >= len(prompts))
    if isinstance(second, ProcessClient) and sys.platform == "linux":  # it is idle afterwards
        before = _cpu_seconds(second.pid)
        await asyncio.sleep(2.0)
        assert _cpu_seconds(second.pid) - before < 0.1
    await second.stop()
