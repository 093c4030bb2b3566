"""Preempted rows go on from their state: nothing is computed twice, and no token changes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from conformance.weights import tiny_model as conformance_model
from fake_engine import model_info
from test_chunked import _llama4
from test_client import PATIENCE
from test_engine import Bench
from tiny import tiny_model

from chairlift.cache import swap_files
from chairlift.cache.capacity import Capacity
from chairlift.cache.container import SavedStateError
from chairlift.cache.quantized import Quantization
from chairlift.cache.swap_files import SwapFiles
from chairlift.engine.messages import Abort
from chairlift.engine.probe import probe
from chairlift.metrics.recorder import Recorder

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
# Of two greedy tokens whose log-probabilities are that close, rounding decides where KV is quantized:
# a code jumps, whatever preempts a row or does not.
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
    for name, index in expected.outputs:
        pairs = zip(got.outputs[name, index], expected.outputs[name, index], strict=True)
        for at, (ours, theirs) in enumerate(pairs):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            [one], [other] = ours.logprobs, theirs.logprobs
            if got.quantization and other.top[0][1] - other.top[1][1] < TIE:
                break
            assert ours.token_ids == theirs.token_ids, (name, at)
            assert ours.finish == theirs.finish
            close = TIE / 2 if got.quantization else 1e-3
            assert one.logprob == pytest.approx(other.logprob, abs=close)


def _total(bench: Bench, source: str) -> int:
    return sum(stats.resumed.get(source, 0) for stats in bench.stats)


def _preemptions(bench: Bench) -> int:
    return sum(stats.preemptions for stats in bench.stats)


def _prefilled(bench: Bench) -> int:
    return sum(stats.prefill_tokens for stats in bench.stats)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_preempted_rows_go_on_with_their_tokens(name: str, eager: bool) -> None:
    kind = KINDS[name]
    model, ample = _ample(name)
    kept = _bench(kind, model, swap=PLENTY, eager=eager)
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
    kept = _bench(kind, model, swap=budget, swap_files=files, offloads=True)
    _serve(kept)
    assert _total(kept, "disk") > 0
    _assert_same(kept, ample)
    assert all(stats.swapped_bytes["memory"] <= budget for stats in kept.stats)
    assert max(stats.swapped_bytes["disk"] for stats in kept.stats) > 0
    assert kept.stats[-1].swapped_bytes["disk"] == 0
    kept.core.close(1)
