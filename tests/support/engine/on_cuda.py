"""Replaces the CUDA kernels by NumPy, for tests on the CPU."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from chairlift.cache.pages.layer import PagedStep
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda import fused_linear
from chairlift.engine.cuda import low_rank as cuda_low_rank
from chairlift.engine.cuda.heads import Heads, SplitHeads
from chairlift.engine.model.paged.compiled import BuiltStep, CompiledSteps, Positions


class ComparedSteps(CompiledSteps):
    """Runs each step uncompiled, and compares its result with the compiled one's.

    The kernels of compiled steps here write nothing, unlike CUDA's.
    """

    compared = built_ahead = 0

    def __call__(
        self,
        step: PagedStep,
        tokens: mx.array,
        positions: Positions,
        built: BuiltStep | None = None,
    ) -> mx.array:
        plain = self._plain(step, tokens, positions)
        mx.eval(plain)
        if not self._gives_up and self._is_steady(step, positions):
            compiled = self._compiled(step, tokens, positions)
            assert mx.allclose(compiled, plain, rtol=1e-3, atol=1e-3).item()
            self.compared += 1
            if built is not None and built.is_of(self, step, positions):
                assert mx.allclose(built.logits, plain, rtol=1e-3, atol=1e-3).item()
                self.built_ahead += 1
        return plain


def split_heads(product: mx.array, positions: mx.array, heads: Heads) -> SplitHeads:
    rows, length, _ = product.shape
    if heads.bias is not None:
        product = product + heads.bias
    separate = product.reshape(rows, length, -1, heads.dim).swapaxes(1, 2)
    ends = [heads.heads, heads.heads + heads.key_heads]
    queries, keys, values = mx.split(separate, ends, axis=1)
    if heads.norms is not None:
        queries = mx.fast.rms_norm(queries, heads.norms.query, heads.norms.eps)
        keys = mx.fast.rms_norm(keys, heads.norms.key, heads.norms.eps)
    rotated = (
        mx.fast.rope(
            x,
            2 * heads.frequencies.size,
            traditional=False,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=1 / heads.frequencies,
        )
        for x in (queries, keys)
    )
    return SplitHeads(*rotated, values)


def _swiglu(product: mx.array) -> mx.array:
    gate, up = mx.split(product, 2, axis=-1)
    return nn.silu(gate) * up


LOW_RANK_CALLS: list[int] = []


def _add_low_rank(y: mx.array, x: mx.array, own: mx.array, a: mx.array, b: mx.array) -> mx.array:
    LOW_RANK_CALLS.append(len(y))
    chosen = mx.maximum(own, 0)
    wide = (x[:, None] @ a[chosen].swapaxes(1, 2) @ b[chosen])[:, 0]
    return y + mx.where(own[:, None] >= 0, wide, 0)


@pytest.fixture
def low_rank_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    LOW_RANK_CALLS.clear()
    monkeypatch.setattr(cuda_low_rank, "works", lambda: True)
    monkeypatch.setattr(cuda_low_rank, "add_low_rank", _add_low_rank)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_block, "split_heads", split_heads)
    for module in (cuda_block, fused_linear):
        monkeypatch.setattr(module, "swiglu", _swiglu)
