"""An engine whose pages are quantized gives the tokens of one whose columns are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.engine.bench import Bench
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.quantized import Quantization
from chairlift.engine.model import attention
from chairlift.engine.model.trials.probe import probe

pytestmark = pytest.mark.usefixtures("small_blocks")
PREFIX_BYTES = 1 << 22


def _model(kind: TinyKind) -> Any:
    model = tiny_model(kind, seed=3, head_dim=32)
    attention.install(model)
    return model


def _run(bench: Bench, seed: int) -> dict[tuple[str, int], list[int]]:
    """Random requests, some with the same beginning; the tokens of each choice."""
    random_ = random.Random(seed)
    shared = [random_.randrange(3, 250) for _ in range(20)]
    choices = []
    for number in range(9):
        own = [random_.randrange(3, 250) for _ in range(random_.randint(1, 18))]
        prompt = shared[: random_.choice([0, 10, 20])] + own
        n = random_.choice([1, 1, 2])
        choices += [(str(number), index) for index in range(n)]
        # The first ones are long and arrive together, so that some are preempted.
        length = 34 if number < 4 else random_.randint(1, 15)
        bench.submit(str(number), prompt, length, n)
        for _ in range(0 if number < 3 else random_.randint(0, 6)):
            bench.step()
    bench.drain()
    return {choice: bench.tokens(*choice) for choice in choices}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(("bits", "swap"), [(8, 0), (4, 1 << 24)])
def test_tokens_equal_those_of_columns(kind: TinyKind, bits: int, swap: int) -> None:
    model, quantization = _model(kind), Quantization(bits, 32)
    expected = _run(Bench(model, quantization=quantization, prefix=PREFIX_BYTES), seed=bits)
    token_bytes = probe(model, kind, quantization).geometry.bytes_per_token
    bench = Bench(
        model,
        quantization=quantization,
        kernels=HostPages(),
        kv=6 * PAGE_TOKENS * token_bytes,
        swap=swap,
        prefix=80 * token_bytes,
    )
    assert _run(bench, seed=bits) == expected
    (band,) = bench.core.batch.bands
    assert isinstance(band, PagedBatch)
    keys = [layer.buffers.keys for layer in band.memory.layers if layer.buffers]
    assert {array.dtype for array in keys} == {mx.uint32}
    assert sum(stats.preemptions for stats in bench.stats)


def test_pages_take_the_bytes_of_their_bits() -> None:
    def page_bytes(quantization: Quantization | None) -> int:
        bench = Bench(_model("llama"), quantization=quantization, kernels=HostPages(), kv=1 << 20)
        bench.submit("one", [5, 6, 7], 2)
        bench.drain()
        (band,) = bench.core.batch.bands
        assert isinstance(band, PagedBatch)
        return band.memory.page_bytes(None)

    exact, eight, four = map(page_bytes, (None, Quantization(8, 32), Quantization(4, 32)))
    # Of 32 float32 numbers, the codes, a scale and a bias.
    assert (eight / exact, four / exact) == ((32 + 8) / 128, (16 + 8) / 128)


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "reads"), [(True, False), (False, True)])
def test_prefixes_on_disk_serve_pages_and_columns(saves: bool, reads: bool, tmp_path: Path) -> None:
    prompt = [random.Random(5).randrange(3, 250) for _ in range(3 * PAGE_TOKENS // 2)]
    tokens = []
    for paged in (saves, reads):
        bench = Bench(
            _model("gemma3"),
            quantization=Quantization(8, 32),
            kernels=HostPages() if paged else None,
            kv=1 << 22,
            prefix=PREFIX_BYTES,
            directory=tmp_path,
        )
        bench.submit("one", prompt, 6)
        bench.drain()
        bench.core.close(10)
        tokens.append(bench.tokens("one"))
        cached = [output.cached_tokens for output in bench.outputs["one", 0]]
    assert tokens[0] == tokens[1]
    assert sum(cached) > PAGE_TOKENS
