"""Preempted rows go on from their state: nothing is computed twice, and no token changes."""

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
from support.engine.engine_client import PATIENCE, drained, request, tokens_of
from support.engine.swap import KINDS, Kind, assert_same, squeeze
from support.tiny import tiny_model, tiny_model_dir

from chairlift.cache.swap.files import SwapFiles
from chairlift.engine.client.local import LocalClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Abort, StepStats
from chairlift.engine.model.probe import probe

PLENTY = 1 << 26
# Steps before there is memory for two sequences only, and how many it stays like that.
BEFORE, SQUEEZED = 40, 30
VOCABULARY = 128


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SwapFiles]:
    made = SwapFiles(tmp_path, PLENTY)
    yield made
    made.close()
    assert not list(tmp_path.iterdir()), "files have no names"


def _tokens(seed: int, count: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(3, VOCABULARY) for _ in range(count)]


PROMPTS = [_tokens(i, length) for i, length in enumerate((7, 30, 20, 1, 35, 12))]
# Greedy rows and sampled ones, whose penalties count what came before they were preempted.
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.1}


def _bench(kind: Kind, model: Any, **options: Any) -> Bench:
    return Bench(model, tokens=30, quantization=kind.quantization, **options)


@cache
def _ample(name: str) -> tuple[Any, Bench]:
    """A model, and what it gives where nobody is preempted."""
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
        bench.submit(str(i), prompt, 100, logprobs=2, **params)


def _serve(bench: Bench, until: Callable[[], object] = lambda: True) -> None:
    """Memory is short for a while, at least until what has to be seen then is there."""
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


@pytest.mark.parametrize("name", KINDS)
def test_preempted_rows_go_on_with_their_tokens(name: str) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    kept = _bench(kind, model, swap=PLENTY)
    _serve(kept)
    assert _preemptions(kept) == _total(kept, "memory") == 4
    assert _total(kept, "recompute") == 0
    assert_same(kept, ample)
    # A resumed row feeds its last token in a chunk of its own instead of with the others.
    assert _prefilled(kept) == _prefilled(ample) + _preemptions(kept)
    assert sum(s.decode_tokens + s.prefill_tokens for s in kept.stats) == sum(
        s.decode_tokens + s.prefill_tokens for s in ample.stats
    ), "no token is computed twice"
    assert max(stats.swapped_bytes["memory"] for stats in kept.stats) > 0
    assert kept.stats[-1].swapped_bytes == {"memory": 0, "disk": 0}


@pytest.mark.parametrize("name", KINDS)
def test_without_memory_for_them_they_are_computed_again(name: str) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    again = _bench(kind, model)
    _serve(again)
    assert _preemptions(again) == _total(again, "recompute") == 4
    assert_same(again, ample)
    assert _prefilled(again) > _prefilled(ample) + 20 * _preemptions(again)


@pytest.mark.parametrize("name", KINDS)
def test_what_memory_has_no_room_for_goes_to_disk(name: str, files: SwapFiles) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    geometry = probe(model, "test", kind.quantization).geometry
    budget = geometry.used([80] * 4)
    kept = _bench(kind, model, swap=budget, swap_files=files, offloads=True, eager=True)
    woken = threading.Event()
    kept.core.on_due(woken.set)
    _serve(kept, lambda: kept.core.swap.disk_nbytes)
    assert woken.is_set(), "an idle engine would sleep on"
    assert _total(kept, "disk") > 0
    assert_same(kept, ample)
    assert all(stats.swapped_bytes["memory"] <= budget for stats in kept.stats)
    assert max(stats.swapped_bytes["disk"] for stats in kept.stats) > 0
    assert kept.stats[-1].swapped_bytes["disk"] == 0
    kept.core.close(1)


def _half_a_prompt(swap: int) -> Bench:
    """A prompt is computed two tokens a step beside a row, and gives way after 50 steps."""
    bench = Bench(tiny_model("llama", seed=2), rows=2, tokens=3, swap=swap)
    bench.submit("old", [5, 6, 7], 150)
    bench.step()
    bench.submit("young", _tokens(2, 170), 5)
    for _ in range(50):
        bench.step()
    squeeze(bench, 1)
    bench.drain()
    return bench


def test_a_half_computed_prompt_is_not_computed_again() -> None:
    kept, again = _half_a_prompt(PLENTY), _half_a_prompt(0)
    assert _preemptions(kept) == _total(kept, "memory") == 1
    assert _prefilled(kept) == 3 + 170
    assert _total(again, "recompute") == 1
    assert _prefilled(again) == 3 + 170 + 2 * 50
    for name in ("old", "young"):
        assert kept.tokens(name) == again.tokens(name)


def _until_preempted(bench: Bench) -> str:
    """Serves until the states of four are kept; whose is next."""
    _submit(bench)
    for _ in range(BEFORE):
        bench.step()
    squeeze(bench, 2)
    [first, *others] = bench.core.scheduler.waiting
    assert bench.core.swap.covers(first) == first.num_tokens - 1
    assert len(others) == 3
    return first.request_id


def test_who_is_aborted_while_it_waits_gives_its_memory_back() -> None:
    kind = KINDS["full"]
    bench = _bench(kind, kind.make(), swap=PLENTY)
    name = _until_preempted(bench)
    before = bench.stats[-1].swapped_bytes["memory"]
    bench.core.abort(Abort(name))
    squeeze(bench, 2)
    assert 0 < bench.stats[-1].swapped_bytes["memory"] < before
    for sequence in list(bench.core.scheduler.waiting):
        bench.core.abort(Abort(sequence.request_id))
    bench.step()
    assert bench.stats[-1].swapped_bytes == {"memory": 0, "disk": 0}


def test_who_is_aborted_on_disk_gives_its_file_back(files: SwapFiles) -> None:
    kind = KINDS["full"]
    model = kind.make()
    budget = probe(model, "test").geometry.used([80] * 4)
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


@pytest.mark.parametrize("name", ["full", "window", "state", "cache lists"])
def test_random_traffic_under_pressure_gives_the_same_tokens(name: str, files: SwapFiles) -> None:
    """Now and then there is memory for a few sequences only. Choices, aborts, shared prefixes;
    states in memory, on disk and nowhere.
    """
    kind = KINDS[name]
    model = kind.make()
    nbytes = probe(model, "test").geometry.used([150])

    def run(tight: bool) -> Bench:
        random_, pressure = random.Random(1), random.Random(2)
        options = {"swap": nbytes, "swap_files": files, "prefix": nbytes} if tight else {}
        bench = _bench(kind, model, **options)
        squeezed = False

        def step() -> None:
            nonlocal squeezed
            squeezed = tight and pressure.random() < (0.9 if squeezed else 0.05)
            squeeze(bench, 3 if squeezed else 1000)

        for i in range(16):
            prompt = [*_tokens(i % 3, random_.randrange(1, 40)), *_tokens(50 + i, 3)]
            sampled = SAMPLED | {"seed": i} if random_.random() < 0.5 else {}
            count, n = random_.randrange(40, 130), random_.choice([1, 1, 1, 2])
            bench.submit(str(i), prompt, count, n, logprobs=2, **sampled)
            for _ in range(random_.randrange(12)):
                step()
            if i % 6 == 5:
                leaves = str(random_.randrange(i))
                bench.core.abort(Abort(leaves))
                gone.add(leaves)
        while not bench.core.idle:
            step()
        bench.drain()
        assert bench.core.swap.nbytes == bench.core.swap.disk_nbytes == 0
        return bench

    gone: set[str] = set()
    ample, tight = run(tight=False), run(tight=True)
    for key in [key for key in {*ample.outputs, *tight.outputs} if key[0] in gone]:
        ample.outputs.pop(key, None)
        tight.outputs.pop(key, None)
    assert_same(tight, ample)
    assert _preemptions(tight) > 8
    assert all(stats.swapped_bytes["memory"] <= nbytes for stats in tight.stats)
    assert min(_total(tight, source) for source in ("memory", "disk", "recompute")) > 0


async def test_the_engine_is_started_with_it(tmp_path: Path) -> None:
    source = ModelSource("tiny", "directory", tiny_model_dir(tmp_path, "llama", 2))
    token = probe(tiny_model("llama"), "test").geometry.bytes_per_token
    config = EngineConfig(
        max_rows=8,
        kv_memory=700 * token,
        prefix_cache_bytes=0,
        swap_memory=1000 * token,
        swap_dir=tmp_path / "swap",
    )
    client = LocalClient(config, source)
    steps: list[StepStats] = []
    client.on_step = steps.append
    await client.start()
    streams = [client.submit(request(prompt, max_tokens=200)) for prompt in PROMPTS]
    replies = [await drained(stream) for stream in streams]
    assert all(len(tokens_of(reply[0])) == 200 for reply in replies)
    kept = sum(stats.resumed["memory"] + stats.resumed["disk"] for stats in steps)
    assert sum(stats.preemptions for stats in steps) == kept > 0
    await client.stop()

    (tmp_path / "file").write_text("")
    wrong = LocalClient(replace(config, swap_dir=tmp_path / "file"), source)
    with pytest.raises(ModelError, match="swap-dir"):
        await wrong.start()
    await wrong.stop()
