"""Fused blocks of divided models: the ranks, which are threads here, compute what one would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.engine.on_cuda import kernels
from support.tiny import TinyKind, tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda import fused_linear
from chairlift.engine.model import attention
from chairlift.engine.parallel.shard import shard

__all__ = ["kernels"]
_SIZE = 2


class _Ranks:
    """Threads that sum as ranks do: each waits until all have brought their part."""

    def __init__(self) -> None:
        self._parts: dict[int, mx.array] = {}
        self._barrier = threading.Barrier(_SIZE, timeout=60)
        self.sums = [0] * _SIZE

    def run(self, work: Callable[[Any], mx.array]) -> list[mx.array]:
        """The result of ``work`` on each rank, which gets the rank's group."""
        with ThreadPoolExecutor(_SIZE) as pool:
            jobs = [pool.submit(self._run, work, rank) for rank in range(_SIZE)]
            return [job.result() for job in jobs]

    def _run(self, work: Callable[[Any], mx.array], rank: int) -> mx.array:
        try:
            result = work(_Group(rank))
            mx.eval(result)
        except BaseException:
            self._barrier.abort()
            raise
        return result

    def all_sum(self, x: mx.array, group: Any) -> mx.array:
        mx.eval(x)
        self._parts[group.rank()] = x
        self._barrier.wait()
        total: mx.array = sum(self._parts[rank] for rank in range(_SIZE))
        mx.eval(total)
        self._barrier.wait()
        self.sums[group.rank()] += 1
        return total


class _Group:
    def __init__(self, rank: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: _SIZE


def _logits(model: Any) -> mx.array:
    """Of a prompt and of three tokens after it."""
    batch = BatchCache([LayerKind(None)] * len(model.layers))
    for _ in range(2):
        batch.join(columns=16)
    results = []
    for length in (5, 1, 1, 1):
        with batch.step(length):
            tokens = mx.arange(2 * length).reshape(2, length) % 90 + 3
            results.append(model(tokens, cache=batch.layers))
            mx.eval(results[-1])
    return mx.concatenate(results, axis=1)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_ranks_compute_what_one_would(
    kind: TinyKind, bits: int | None, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built() -> Any:
        model = tiny_model(kind)
        if bits is not None:
            nn.quantize(model, 32, bits)
        return model

    def fused(group: Any) -> mx.array:
        model = built()
        shard(model, group)
        attention.install(model)
        cuda_block.install(model)
        names = [type(layer).__call__.__module__ for layer in model.layers]
        assert names == [cuda_block.__name__] * len(model.layers)
        before = ranks.sums[group.rank()]
        logits = _logits(model)
        assert ranks.sums[group.rank()] - before == 4 * 2 * len(model.layers)
        return logits

    expected = _logits(built())
    ranks = _Ranks()
    monkeypatch.setattr(mx.distributed, "all_sum", ranks.all_sum)
    for logits in ranks.run(fused):
        assert mx.allclose(logits, expected, rtol=1e-3, atol=1e-4).item()


def test_a_product_of_several_ranks_adds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal parts, with an addition: nothing that all ranks have is summed."""
    ranks = _Ranks()
    monkeypatch.setattr(mx.distributed, "all_sum", ranks.all_sum)
    linear = nn.Linear(64, 32, bias=False)
    x, to = mx.random.normal((3, 64)), mx.random.normal((3, 32))
    mx.eval(linear.parameters(), x, to)

    def added(group: Any) -> mx.array:
        part = nn.layers.distributed.shard_linear(linear, "sharded-to-all", group=group)
        product = fused_linear.fuse_linears([part])
        assert product is not None
        product.addition = lambda y, x: 2 * y
        columns = x[:, 32 * group.rank() : 32 * (group.rank() + 1)]
        return mx.stack([product.added(columns, to), product(columns) + to])

    expected = x @ linear.weight.T
    for both in ranks.run(added):
        assert mx.allclose(both[0], 2 * (expected + to), atol=1e-5).item()
        assert mx.allclose(both[1], 2 * expected + to, atol=1e-5).item()
