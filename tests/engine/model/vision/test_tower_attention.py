"""Attention in blocks equals ``mx.fast``'s, for all shapes and masks."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.model.vision import tower_attention
from chairlift.engine.model.vision.tower_attention import divided_attention


@given(
    rows=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    step=st.integers(1, 20),
    seen=st.integers(1, 30),
    mask=st.sampled_from(
        ["none", "bool", "added", "by head", "two axes", "three axes", "one query"]
    ),
    score_bytes=st.sampled_from([4, 400, 1 << 23]),
    large=st.booleans(),
)
@settings(max_examples=80)
def test_blocks_equal_the_whole(
    rows: int,
    key_heads: int,
    shared: int,
    step: int,
    seen: int,
    mask: str,
    score_bytes: int,
    large: bool,
) -> None:
    heads = key_heads * shared
    keys = mx.random.split(mx.random.key(seen), 4)
    q = mx.random.normal((rows, heads, step, 8), key=keys[0]) * (30 if large else 1)
    k = mx.random.normal((rows, key_heads, seen, 8), key=keys[1])
    v = mx.random.normal((rows, key_heads, seen, 6), key=keys[2])
    shape = {
        "bool": (rows, 1, step, seen),
        "added": (1, 1, step, seen),
        "by head": (rows, heads, step, seen),
        "two axes": (step, seen),
        "three axes": (heads, step, seen),
        "one query": (rows, 1, 1, seen),
    }.get(mask)
    given_mask = None
    if shape is not None:
        drawn = mx.random.normal(shape, key=keys[3])
        drawn[..., 0] = 1.0
        given_mask = drawn if mask == "added" else drawn > 0
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=given_mask)
    outputs: list[mx.array] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower_attention, "_SCORE_BYTES", score_bytes)
        with divided_attention(outputs.append):
            found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=given_mask)
    assert found.shape == expected.shape
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()
    queries = rows * heads * step
    if score_bytes == 4:
        assert len(outputs) == (queries if queries > 1 else 0)
    assert sum(map(len, outputs)) == (queries if outputs else 0)


def test_other_forms_are_mlxs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mx.fast.scaled_dot_product_attention
    q = mx.ones((1, 1, 4, 8))
    outputs: list[mx.array] = []
    monkeypatch.setattr(tower_attention, "_SCORE_BYTES", 4)
    with divided_attention(outputs.append):
        assert mx.fast.scaled_dot_product_attention is not original
        mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, mask="causal")
        mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, sinks=mx.zeros(1))
        half = q.astype(mx.bfloat16)
        mx.fast.scaled_dot_product_attention(half, half, half, scale=1.0)
        none = mx.zeros((1, 1, 0, 8))
        assert mx.fast.scaled_dot_product_attention(none, q, q, scale=1.0).shape == none.shape
    assert not outputs
    assert mx.fast.scaled_dot_product_attention is original
