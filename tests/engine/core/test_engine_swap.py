"""Preempted rows continue from their swapped state: nothing is computed twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.engine.bench import Bench
from support.engine.client.engine_client import PATIENCE, drained, request, tokens_of
from support.engine.swap import KINDS, Kind, assert_same, squeeze
from support.tiny import tiny_model, tiny_model_dir

from chairlift.cache.swap.files import SwapFiles
from chairlift.engine.client.local import LocalClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Abort, StepStats
from chairlift.engine.model.trials.probe import probe

pytestmark = pytest.mark.usefixtures("small_blocks")
PLENTY = 1 << 26
# Steps before memory shrinks to two sequences, and the steps that it stays so.
BEFORE, SQUEEZED = 14, 8
VOCABULARY = 128


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SwapFiles]:
    files = SwapFiles(tmp_path, PLENTY)
    yield files
    files.close()
    assert not list(tmp_path.iterdir()), "the files are unlinked"


def _tokens(seed: int, count: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(3, VOCABULARY) for _ in range(count)]


PROMPTS = [_tokens(i, length) for i, length in enumerate((7, 30, 20, 1, 35, 12))]
# Penalties of sampled rows count the tokens from before the preemption.
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.1}


def _bench(kind: Kind, model: Any, **options: Any) -> Bench:
    return Bench(model, tokens=30, quantization=kind.quantization, **options)


@cache
def _ample(name: str) -> tuple[Any, Bench]:
    """A model, and its outputs without preemption."""
    model = KINDS[name].make()
    bench = _bench(KINDS[name], model)
    _submit(bench)
    bench.drain()
    assert _preemptions(bench) == 0
    return model, bench


def _submit(bench: Bench) -> None:
    for i, prompt in enumerate(PROMPTS):
        sampled = i % 2 and not bench.quantization
        params = SAMPLED | {"seed": i} if sampled else {}
        bench.submit(str(i), prompt, 30, logprobs=2, **params)


def _serve(bench: Bench, until: Callable[[], object] = lambda: True) -> None:
    """Serves PROMPTS; memory is short for SQUEEZED steps, and until ``until`` holds."""
    _submit(bench)
    for _ in range(BEFORE):
        bench.step()
    steps, deadline = 0, time.monotonic() + PATIENCE
    while steps < SQUEEZED or not until():
        assert time.monotonic() < deadline
        squeeze(bench, 2)
        steps += 1
    bench.drain()


def _total(bench: Bench, source: str) -> int:
    return sum(stats.resumed.get(source, 0) for stats in bench.stats)


def _preemptions(bench: Bench) -> int:
    return sum(stats.preemptions for stats in bench.stats)


def _prefilled(bench: Bench) -> int:
    return sum(stats.prefill_tokens for stats in bench.stats)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_preempted_rows_continue_with_the_same_tokens(name: str) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    bench = _bench(kind, model, swap=PLENTY)
    _serve(bench)
    assert _preemptions(bench) == _total(bench, "memory") == 4
    assert _total(bench, "recompute") == 0
    assert_same(bench, ample)
    # A resumed row feeds its last token as a chunk of one token, not with the decode rows.
    assert _prefilled(bench) == _prefilled(ample) + _preemptions(bench)
    assert sum(s.decode_tokens + s.prefill_tokens for s in bench.stats) == sum(
        s.decode_tokens + s.prefill_tokens for s in ample.stats
    ), "no token is computed twice"
    assert max(stats.swapped_bytes["memory"] for stats in bench.stats) > 0
    assert bench.stats[-1].swapped_bytes == {"memory": 0, "disk": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_without_swap_memory_preempted_rows_are_recomputed(name: str) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    recomputed = _bench(kind, model)
    _serve(recomputed)
    assert _preemptions(recomputed) == _total(recomputed, "recompute") == 4
    assert_same(recomputed, ample)
    assert _prefilled(recomputed) > _prefilled(ample) + 12 * _preemptions(recomputed)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_states_that_exceed_swap_memory_go_to_disk(name: str, files: SwapFiles) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    geometry = probe(model, "test", kind.quantization).geometry
    budget = geometry.used([30] * 4)
    bench = _bench(kind, model, swap=budget, swap_files=files, offloads=True, eager=True)
    woken = threading.Event()
    bench.core.on_due(woken.set)
    _serve(bench, lambda: bench.core.swap.disk_nbytes)
    assert woken.is_set(), "an idle engine would not wake up"
    assert _total(bench, "disk") > 0
    assert_same(bench, ample)
    assert all(stats.swapped_bytes["memory"] <= budget for stats in bench.stats)
    assert max(stats.swapped_bytes["disk"] for stats in bench.stats) > 0
    assert bench.stats[-1].swapped_bytes["disk"] == 0
    bench.core.close(1)


def _half_a_prompt(swap: int) -> Bench:
    """Prefills a prompt, two tokens a step beside a row, and preempts it after 20 steps."""
    bench = Bench(tiny_model("llama", seed=2), rows=2, tokens=3, swap=swap)
    bench.submit("old", [5, 6, 7], 60)
    bench.step()
    bench.submit("young", _tokens(2, 70), 5)
    for _ in range(20):
        bench.step()
    squeeze(bench, 1)
    bench.drain()
    return bench


@pytest.mark.slow
def test_a_partly_computed_prompt_is_not_recomputed() -> None:
    swapped, recomputed = _half_a_prompt(PLENTY), _half_a_prompt(0)
    assert _preemptions(swapped) == _total(swapped, "memory") == 1
    assert _prefilled(swapped) == 3 + 70
    assert _total(recomputed, "recompute") == 1
    assert _prefilled(recomputed) == 3 + 70 + 2 * 20
    for name in ("old", "young"):
        assert swapped.tokens(name) == recomputed.tokens(name)


def _until_preempted(bench: Bench) -> str:
    """Serves until four states are swapped out; returns the next request to resume."""
    _submit(bench)
    for _ in range(BEFORE):
        bench.step()
    squeeze(bench, 2)
    [first, *others] = bench.core.scheduler.waiting
    assert bench.core.swap.covers(first) == first.num_tokens - 1
    assert len(others) == 3
    return first.request_id


def test_aborting_a_swapped_request_frees_its_memory() -> None:
    kind = KINDS["full"]
    bench = _bench(kind, kind.make(), swap=PLENTY)
    name = _until_preempted(bench)
    before = bench.stats[-1].swapped_bytes["memory"]
    (swapped,) = bench.core.scheduler.sequences_of(name)
    time.sleep(0.05)
    bench.core.abort(Abort(name))
    squeeze(bench, 2)
    (choice,) = [choice for choice in bench.finished if choice.reason == "abort"]
    assert choice.last_token == swapped.last_token_at
    assert choice.last_token is not None
    assert choice.finished - choice.last_token >= 0.05
    assert 0 < bench.stats[-1].swapped_bytes["memory"] < before
    for sequence in list(bench.core.scheduler.waiting):
        bench.core.abort(Abort(sequence.request_id))
    bench.step()
    assert bench.stats[-1].swapped_bytes == {"memory": 0, "disk": 0}


def test_aborting_a_request_on_disk_frees_its_file(files: SwapFiles) -> None:
    kind = KINDS["full"]
    model = kind.make()
    budget = probe(model, "test").geometry.used([30] * 4)
    bench = _bench(kind, model, swap=budget, swap_files=files)
    _until_preempted(bench)
    deadline = time.monotonic() + PATIENCE
    while not (on_disk := list(filter(bench.core.swap.fetching, bench.core.scheduler.waiting))):
        assert time.monotonic() < deadline
        squeeze(bench, 2)
    assert bench.stats[-1].swapped_bytes["disk"] > 0
    for sequence in on_disk:
        bench.core.abort(Abort(sequence.request_id))
    assert bench.core.swap.disk_nbytes == 0
    bench.drain()
    bench.core.close(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "window", "state", "cache lists"])
def test_random_traffic_under_pressure_gives_the_same_tokens(name: str, files: SwapFiles) -> None:
    """At random times, memory suffices for a few sequences only.

    Includes choices, aborts, shared prefixes, and states in memory, on disk and dropped.
    """
    kind = KINDS[name]
    model = kind.make()
    nbytes = probe(model, "test").geometry.used([60])

    def run(tight: bool) -> Bench:
        random_, pressure = random.Random(1), random.Random(2)
        options = {"swap": nbytes, "swap_files": files, "prefix": nbytes} if tight else {}
        bench = _bench(kind, model, **options)
        squeezed = False

        def step() -> None:
            nonlocal squeezed
            squeezed = tight and pressure.random() < (0.85 if squeezed else 0.1)
            squeeze(bench, 3 if squeezed else 1000)

        for i in range(12):
            prompt = [*_tokens(i % 3, random_.randrange(1, 40)), *_tokens(50 + i, 3)]
            sampled = SAMPLED | {"seed": i} if random_.random() < 0.5 else {}
            count, n = random_.randrange(14, 32), random_.choice([1, 1, 1, 2])
            bench.submit(str(i), prompt, count, n, logprobs=2, **sampled)
            for _ in range(random_.randrange(6)):
                step()
            if i % 6 == 5:
                name = str(random_.randrange(i))
                bench.core.abort(Abort(name))
                aborted.add(name)
        while not bench.core.idle:
            step()
        bench.drain()
        assert bench.core.swap.nbytes == bench.core.swap.disk_nbytes == 0
        return bench

    aborted: set[str] = set()
    ample, tight = run(tight=False), run(tight=True)
    for key in [key for key in {*ample.outputs, *tight.outputs} if key[0] in aborted]:
        ample.outputs.pop(key, None)
        tight.outputs.pop(key, None)
    assert_same(tight, ample)
    assert _preemptions(tight) > 8
    assert all(stats.swapped_bytes["memory"] <= nbytes for stats in tight.stats)
    assert min(_total(tight, source) for source in ("memory", "disk", "recompute")) > 0


@pytest.mark.slow
async def test_an_engine_is_started_with_swap(tmp_path: Path) -> None:
    source = ModelSource("tiny", "directory", tiny_model_dir(tmp_path, "llama", 2))
    token = probe(tiny_model("llama"), "test").geometry.bytes_per_token
    config = EngineConfig(
        max_rows=8,
        kv_memory=260 * token,
        prefix_cache_bytes=0,
        swap_memory=400 * token,
        swap_dir=tmp_path / "swap",
    )
    client = LocalClient(config, source)
    steps: list[StepStats] = []
    client.on_step = steps.append
    await client.start()
    streams = [client.submit(request(prompt, max_tokens=70)) for prompt in PROMPTS]
    replies = [await drained(stream) for stream in streams]
    assert all(len(tokens_of(reply[0])) == 70 for reply in replies)
    swapped = sum(stats.resumed["memory"] + stats.resumed["disk"] for stats in steps)
    assert sum(stats.preemptions for stats in steps) == swapped > 0
    await client.stop()

    (tmp_path / "file").write_text("")
    wrong = LocalClient(replace(config, swap_dir=tmp_path / "file"), source)
    with pytest.raises(ModelError, match="swap-dir"):
        await wrong.start()
    await wrong.stop()
