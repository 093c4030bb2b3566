"""Attention of prompt chunks in columns on CUDA, in MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

from chairlift.cache.packed.step import Part
from chairlift.engine.cuda import attention as cuda_attention


@pytest.mark.parametrize("few_scores", [0, 1 << 30])
@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, 130), (0, 128), (57, 40), (128, 9)])
def test_a_chunk_attends_to_all_tokens_up_to_itself(
    old: int, new: int, few_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both paths, padded kernels and plain products, equal attention with a mask."""
    monkeypatch.setattr(cuda_attention, "FEW_SCORES", few_scores)
    mx.random.seed(old + new)
    queries = mx.random.normal((1, 6, new, 16))
    keys, values = (mx.random.normal((1, 2, old + new, dim)) for dim in (16, 12))
    mask = mx.arange(old, old + new)[:, None] >= mx.arange(old + new)
    chunked = cuda_attention.chunk_attention(queries, keys, values, 0.3)
    reference = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert mx.allclose(chunked, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("booleans", [True, False])
@pytest.mark.parametrize(("new", "dim"), [(9, 16), (1, 320)])
def test_masks_may_be_arrays(booleans: bool, new: int, dim: int) -> None:
    """Of several rows, with heads that share keys; single tokens only with wide heads."""
    mx.random.seed(new)
    queries = mx.random.normal((3, 6, new, dim)) * 0.1
    keys, values = (mx.random.normal((3, 2, 30, size)) for size in (dim, 12))
    seen = mx.random.uniform(shape=(3, 1, new, 30)) < 0.7
    seen[..., 0] = True
    added = mx.where(seen, mx.random.normal((3, 6, new, 30)), -1e9)
    mask = seen if booleans else added
    (mixed,) = cuda_attention.attend([Part(None, queries, keys, values, mask)], 0.3, None)
    reference = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert mixed is not None
    assert mx.allclose(mixed, reference, rtol=1e-4, atol=1e-5)


def test_mlx_computes_what_it_has_kernels_for() -> None:
    queries, keys = mx.zeros((3, 6, 1, 64)), mx.zeros((3, 2, 30, 64))
    mask = mx.ones((3, 1, 1, 30), mx.bool_)
    assert cuda_attention.attend([Part(None, queries, keys, keys, mask)], 0.3, None) == [None]
