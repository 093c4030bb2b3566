"""The caches' real memory never exceeds what the scheduler counts.

The CPU runs steps as GPUs do, packed, padded and not eager, under small limits.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from support.engine.bench import Bench
from support.engine.core import build_core
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.engine.messages import Abort
from chairlift.engine.model import attention
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits

pytestmark = pytest.mark.usefixtures("small_blocks")
PREFIX_BYTES = 1 << 26


@cache
def _model(kind: TinyKind) -> Any:
    model = tiny_model(kind, seed=6)
    attention.install(model)
    return model


class MemoryBench(Bench):
    """A bench with given limits, which checks the bytes of all caches after every step.

    Attributes:
        grown: how often the cache of a prompt had to be resized.
    """

    def __init__(self, kind: TinyKind, prefix: int, swap: int, **limits: Any) -> None:
        super().__init__(_model(kind), prefix=prefix, swap=swap)
        core = self.core
        self.limits = Limits(
            geometry=core.limits.geometry, checkpoint=core.limits.checkpoint, **limits
        )
        self.core = build_core(
            *(_model(kind), core.requests.vocabulary, self.limits, False, prefix),
            swap=core.swap,
        )
        assert self.core.pipeline.forward.packs
        self.grown = 0
        make = self.core.prefill._make_cache

        def watched() -> BatchCache:
            cache = make()
            for layer in cache.attention:
                self._watch(layer)
            return cache

        self.core.prefill._make_cache = watched

    def _watch(self, layer: LayerCache) -> None:
        resize = layer.resize

        def counted(*arguments: Any) -> bool:
            moved = resize(*arguments)
            self.grown += moved
            return moved

        layer.resize = counted  # type: ignore[method-assign]

    def step(self) -> None:
        super().step()
        core = self.core
        charged = {s: s.prompt_bytes for s in core.scheduler.prefilling}
        for sequence, own in core.prefill._caches.items():
            if sequence in charged:
                assert own.nbytes <= charged[sequence]
        assert core.batch.nbytes + core.prefill.nbytes <= self.limits.kv_bytes


def _tokens(seed: int, count: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(3, 250) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_no_prompt_after_a_prefix_outgrows_its_cache(kind: TinyKind) -> None:
    """For any lengths of prompt and prefix, in one chunk and in several."""
    random_ = random.Random(3)
    for tokens in (120, 40):
        bench = MemoryBench(
            *(kind, PREFIX_BYTES, 0),
            max_rows=8,
            max_step_tokens=tokens,
            kv_bytes=1 << 30,
            chunk_multiple=16,
        )
        shared = _tokens(1, 90)
        for number in range(24):
            prefix = random_.randrange(1, 90)
            prompt = [*shared[:prefix], *_tokens(number + 9, random_.randrange(1, 40))]
            bench.submit(str(number), prompt, 2)
            bench.drain()
        assert sum(stats.prefix_hits for stats in bench.stats) > 250
        assert bench.grown == 0


KINDS: list[TinyKind] = ["llama", "gemma3", "lfm2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_the_solo_tokens_under_any_limits(kind: TinyKind, seed: int) -> None:
    random_ = random.Random(f"{kind} {seed}")
    rows = random_.choice([2, 4, 8])
    limits = Limits(
        *(rows, rows + random_.choice([8, 30, 100]), 1 << 40, probe(_model(kind), "test").geometry)
    )
    kv = int(limits.bytes_alone(82) * random_.choice([1.3, 2, 4]))
    bench = MemoryBench(
        *(kind, random_.choice([0, PREFIX_BYTES, 60_000]), random_.choice([0, 1 << 26])),
        max_rows=limits.max_rows,
        max_step_tokens=limits.max_step_tokens,
        kv_bytes=kv,
        chunk_multiple=random_.choice([1, 4, 16]),
        avoid_partial_prefill=random_.random() < 0.5,
        lookahead_columns=random_.choice([0, 16]),
        bands=random_.choice([1, 3]),
        band_bytes=random_.choice([1, 30_000]),
    )
    trunk = _tokens(5, 40)
    requests = {}
    for number in range(9):
        prefix = random_.choice([0, 0, 9, 16, random_.randrange(40)])
        rest = random_.choice([1, 7, 16, 15, random_.randrange(1, 24)])
        count = min(random_.choice([1, 5, 12, 34]), 79 - prefix - rest)
        prompt = [*trunk[:prefix], *_tokens(100 + number, rest)]
        n = random_.choice([1, 1, 1, 2, rows])
        bench.submit(str(number), prompt, count, n=n)
        requests[str(number)] = prompt, count, n
        if number % 5 == 4:
            bench.submit(f"leaves {number}", prompt, 30, n=2)
            bench.step()
            bench.core.abort(Abort(f"leaves {number}"))
        for _ in range(random_.randrange(4)):
            bench.step()
    bench.drain()
    for name, (prompt, count, n) in requests.items():
        tokens = [bench.tokens(name, index) for index in range(n)]
        assert tokens == [solo_tokens(_model(kind), prompt, count, tokens[0])] * n, name
    assert bench.grown == 0
    assert bench.core.batch.nbytes == bench.core.prefill.nbytes == 0
