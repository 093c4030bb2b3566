"""Parts of CUDA's attention that run without a GPU: chunks, and the kernel's lengths."""

from __future__ import annotations

import mlx.core as mx
import pytest

from chairlift.cache.batch import BatchCache
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.cuda import attention as cuda_attention


@pytest.mark.parametrize("few_scores", [0, 1 << 30])
@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, 130), (0, 128), (57, 40), (128, 9)])
def test_a_chunk_attends_to_all_tokens_up_to_itself(
    old: int, new: int, few_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both paths, padded kernels and plain products, equal attention with a mask."""
    monkeypatch.setattr(cuda_attention, "FEW_SCORES", few_scores)
    monkeypatch.setattr(cuda_attention, "_plan", lambda *shape: None)
    mx.random.seed(old + new)
    queries = mx.random.normal((1, 6, new, 16))
    keys, values = (mx.random.normal((1, 2, old + new, dim)) for dim in (16, 12))
    mask = mx.arange(old, old + new)[:, None] >= mx.arange(old + new)
    chunked = cuda_attention.chunk_attention(queries, keys, values, 0.3)
    reference = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert mx.allclose(chunked, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_the_kernels_lengths_agree_with_the_masks(window: int | None) -> None:
    """The visible columns before the cursor, for each row and every window size."""
    batch = BatchCache([LayerKind(window)])
    layer = batch.layers[0]
    for tokens in (3, 9, 1):
        single = BatchCache([LayerKind(window)])
        single.join(columns=16)
        with single.step(tokens):
            single.layers[0].update_and_fetch(*mx.zeros((2, 1, 1, tokens, 4)))
        batch.join(single.extract(0), columns=16)
    for _ in range(20):
        with batch.step(1):
            requests = [(None, False), (None, True), (4, True)]
            masks = [layer.make_mask(1, size, as_array) for size, as_array in requests]
            layer.update_and_fetch(*mx.zeros((2, 3, 1, 1, 4)))
            for mask in masks:
                lengths = layer.seen(mask)
                assert lengths is not None
                if isinstance(mask, mx.array):
                    assert mask.sum(axis=(1, 2, 3)).tolist() == lengths.tolist()
            assert layer.stops.tolist() == [cursor + 1 for cursor in layer.ring.cursors]
            assert layer.seen(mx.ones((3, 1, 1, 1), mx.bool_)) is None, "not a mask of this layer"
