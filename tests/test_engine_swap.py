"""Preempted rows go on from their state: nothing is computed twice, and no token changes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conformance.weights import tiny_model as conformance_model
from test_chunked import _llama4
from test_client import drained, request, tokens_of
from test_engine import Bench
from tiny import tiny_model, tiny_model_dir

from chairlift.cache.capacity import Capacity
from chairlift.cache.quantized import Quantization
from chairlift.cache.swap_files import SwapFiles
from chairlift.engine.client import LocalClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError
from chairlift.engine.messages import Abort, StepStats
from chairlift.engine.probe import probe
from chairlift.engine.source import ModelSource

PLENTY = 1 << 26
# Enough for those who come first to begin, and not for all of them to end.
ROOM = Capacity(6, 110)
VOCABULARY = 128


class Kind(NamedTuple):
    """A model, and how its keys and values are quantized."""

    make: Callable[[], Any]
    quantization: Quantization | None = None


def _quantized_llama4() -> Any:
    return _llama4(head_dim=32, interleave_moe_layer_step=9)


KINDS = {
    "full": Kind(lambda: tiny_model("llama", seed=2)),
    "window": Kind(lambda: tiny_model("gemma3", seed=2)),
    "state": Kind(lambda: tiny_model("lfm2", seed=2)),
    "chunked": Kind(_llama4),
    "quantized": Kind(_quantized_llama4, quantization=Quantization(8, 32)),
    "cache lists": Kind(lambda: conformance_model("falcon_h1")),
}


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
# Where KV is quantized, rounding makes codes jump, and decides between greedy tokens this close,
# preempted or not.
TIE = 0.1
# Greedy rows and sampled ones, whose penalties count what came before they were preempted.
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.1}


def _bench(kind: Kind, model: Any, *, tight: bool = True, **options: Any) -> Bench:
    geometry = probe(model, "test", kind.quantization).geometry
    kv = geometry.reserved(ROOM) if tight else PLENTY
    return Bench(model, kv=kv, tokens=30, quantization=kind.quantization, **options)


@cache
def _ample(name: str) -> tuple[Any, Bench]:
    """A model, and what it gives where nobody is preempted."""
    model = KINDS[name].make()
    bench = _bench(KINDS[name], model, tight=False)
    _serve(bench)
    assert _preemptions(bench) == 0
    return model, bench


def _serve(bench: Bench, count: int = 140) -> None:
    assert max(map(len, PROMPTS)) + count <= bench.core.limits.max_context
    for i, prompt in enumerate(PROMPTS):
        sampled = i % 2 and not bench.quantization
        params = SAMPLED | {"seed": i} if sampled else {}
        bench.submit(str(i), prompt, count, logprobs=2, **params)
    bench.drain()


def _assert_same(got: Bench, expected: Bench) -> None:
    assert got.outputs.keys() == expected.outputs.keys()
    compared = 0
    for name, index in expected.outputs:
        pairs = zip(got.outputs[name, index], expected.outputs[name, index], strict=True)
        for at, (ours, theirs) in enumerate(pairs):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            [one], [other] = ours.logprobs, theirs.logprobs
            if got.quantization and other.top[0][1] - other.top[1][1] < TIE:
                break
            assert ours.token_ids == theirs.token_ids, (name, at)
            compared += 1
            assert ours.finish == theirs.finish
            close = TIE / 2 if got.quantization else 1e-3
            assert one.logprob == pytest.approx(other.logprob, abs=close)
    assert compared > 100


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
    assert _preemptions(kept) == _total(kept, "memory") > 1
    assert _total(kept, "recompute") == 0
    _assert_same(kept, ample)
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
    assert _preemptions(again) == _total(again, "recompute") > 1
    _assert_same(again, ample)
    assert _prefilled(again) > _prefilled(ample) + 20 * _preemptions(again)


@pytest.mark.parametrize("name", KINDS)
def test_what_memory_has_no_room_for_goes_to_disk(name: str, files: SwapFiles) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    geometry = probe(model, "test", kind.quantization).geometry
    budget = geometry.used([120, 180])
    kept = _bench(kind, model, swap=budget, swap_files=files, offloads=True, eager=True)
    woken = threading.Event()
    kept.core.on_due(woken.set)
    _serve(kept)
    assert woken.is_set(), "an idle engine would sleep on"
    assert _total(kept, "disk") > 0
    _assert_same(kept, ample)
    assert all(stats.swapped_bytes["memory"] <= budget for stats in kept.stats)
    assert max(stats.swapped_bytes["disk"] for stats in kept.stats) > 0
    assert kept.stats[-1].swapped_bytes["disk"] == 0
    kept.core.close(1)


def _half_a_prompt(swap: int) -> tuple[Bench, list[int]]:
    """A running row grows while a prompt is computed, two tokens a step, until both do not fit."""
    model = tiny_model("llama", seed=2)
    token = probe(model, "test").geometry.bytes_per_token
    bench = Bench(model, rows=2, tokens=3, kv=1630 * token, swap=swap)
    half = []
    bench.submit("old", _tokens(1, 500), 150)
    bench.submit("young", _tokens(2, 470), 5)
    while not bench.core.idle:
        bench.step()
        half.extend(map(bench.core.swap.covers, bench.core.scheduler.waiting))
    return bench, half


def test_a_half_computed_prompt_is_not_computed_again() -> None:
    kept, half = _half_a_prompt(PLENTY)
    assert _preemptions(kept) == _total(kept, "memory") == 1
    assert 100 < max(half) < 470
    assert _prefilled(kept) == 500 + 470
    again, _ = _half_a_prompt(0)
    assert _total(again, "recompute") == 1
    assert _prefilled(again) == 500 + 470 + max(half)
    for name in ("old", "young"):
        assert kept.tokens(name) == again.tokens(name)


def _until_preempted(bench: Bench) -> str:
    """Serves until somebody's state is kept; whose."""
    for i, prompt in enumerate(PROMPTS):
        bench.submit(str(i), prompt, 140)
    while not _preemptions(bench):
        bench.step()
    [first, *_] = bench.core.scheduler.waiting
    assert bench.core.swap.covers(first) == first.wanted - 1
    return first.request_id


def test_who_is_aborted_while_it_waits_gives_its_memory_back() -> None:
    kind = KINDS["full"]
    bench = _bench(kind, kind.make(), swap=PLENTY)
    name = _until_preempted(bench)
    assert bench.stats[-1].swapped_bytes["memory"] > 0
    bench.core.abort(Abort(name))
    bench.step()
    assert bench.stats[-1].swapped_bytes == {"memory": 0, "disk": 0}
    assert name in {choice.reason and name for choice in bench.finished}


def test_who_is_aborted_on_disk_gives_its_file_back(files: SwapFiles) -> None:
    kind = KINDS["full"]
    model = kind.make()
    # So little memory that half of it is less than any state, and the disk takes who waits.
    budget = probe(model, "test").geometry.used([120, 180])
    bench = _bench(kind, model, swap=budget, swap_files=files)
    _until_preempted(bench)
    deadline = time.monotonic() + 60
    while not (on_disk := list(filter(bench.core.swap.fetching, bench.core.scheduler.waiting))):
        assert time.monotonic() < deadline
        bench.step()
    assert bench.stats[-1].swapped_bytes["disk"] > 0
    for sequence in on_disk:
        bench.core.abort(Abort(sequence.request_id))
    bench.drain()
    assert bench.core.swap.disk_nbytes == 0
    bench.core.close(1)


@pytest.mark.parametrize("name", ["full", "window", "state", "cache lists"])
def test_random_traffic_under_pressure_gives_the_same_tokens(name: str, files: SwapFiles) -> None:
    """Now and then there is memory for a few rows only, for one step. Choices, aborts, shared
    prefixes; states in memory, on disk and nowhere.
    """
    kind = KINDS[name]
    model = kind.make()
    geometry = probe(model, "test").geometry
    nbytes = geometry.used([130])

    def run(tight: bool) -> Bench:
        random_, pressure = random.Random(1), random.Random(2)
        options = {"swap": nbytes, "swap_files": files, "prefix": nbytes} if tight else {}
        bench = _bench(kind, model, tight=False, **options)
        plenty = bench.core.limits
        few = replace(plenty, kv_bytes=geometry.reserved(Capacity(3, 200), plenty.max_step_tokens))

        def step() -> None:
            squeezed = tight and pressure.random() < 0.1
            bench.core.scheduler.limits = few if squeezed else plenty
            bench.step()

        for i in range(24):
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
    _assert_same(tight, ample)
    assert _preemptions(tight) > 20
    assert all(stats.swapped_bytes["memory"] <= nbytes for stats in tight.stats)
    assert min(_total(tight, source) for source in ("memory", "disk", "recompute")) > 0


async def test_the_engine_is_started_with_it(tmp_path: Path) -> None:
    source = ModelSource("tiny", "directory", tiny_model_dir(tmp_path, "llama", 2))
    token = probe(tiny_model("llama"), "test").geometry.bytes_per_token
    config = EngineConfig(
        max_rows=8,
        kv_memory=ROOM.rows * ROOM.columns * token,
        prefix_cache_bytes=0,
        swap_memory=300 * token,
        swap_dir=tmp_path / "swap",
    )
    client = LocalClient(config, source)
    steps: list[StepStats] = []
    client.on_step = steps.append
    await client.start()
    streams = [client.submit(request(prompt, max_tokens=140)) for prompt in PROMPTS]
    replies = [await drained(stream) for stream in streams]
    assert all(len(tokens_of(reply[0])) == 140 for reply in replies)
    kept = sum(stats.resumed["memory"] + stats.resumed["disk"] for stats in steps)
    assert sum(stats.preemptions for stats in steps) == kept > 0
    await client.stop()

    (tmp_path / "file").write_text("")
    wrong = LocalClient(replace(config, swap_dir=tmp_path / "file"), source)
    with pytest.raises(ModelError, match="swap-dir"):
        await wrong.start()
    await wrong.stop()
