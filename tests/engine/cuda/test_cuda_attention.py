"""Attention of prompt chunks in columns on CUDA, in MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

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
