"""Attention in blocks gives the same result in bounded memory."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import TESTS

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.step import Part
from chairlift.cache.ring import Ring
from chairlift.engine.config import EngineConfig
from chairlift.engine.cpu.attention import blocks as attention
from chairlift.engine.cpu.attention.blocks import attended
from chairlift.engine.cpu.views import view
from chairlift.engine.device import memory
from chairlift.engine.device.limits import build_limits
from chairlift.engine.device.profile import CPU, CUDA, METAL, SCORE_BYTES, DeviceProfile
from chairlift.engine.errors import ModelError
from chairlift.engine.model.attention_blocks import blocks, fused_in_blocks

shapes = st.tuples(*[st.integers(1, 6)] * 4)


@given(shapes, st.integers(1, 40), st.integers(1, 4000))
def test_blocks_cover_all_queries_in_order_and_are_small(
    shape: tuple[int, int, int, int], seen: int, score_bytes: int
) -> None:
    order = np.arange(math.prod(shape)).reshape(shape)
    runs = [order[block].reshape(-1) for block in blocks(shape, seen, score_bytes)]
    assert np.array_equal(np.concatenate(runs), np.arange(order.size))
    assert all(4 * seen * run.size <= max(score_bytes, 4 * seen) for run in runs)
    assert len(runs) <= 2 * max(1, 4 * seen * order.size // score_bytes) * max(shape)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    shapes,
    st.integers(0, 20),
    st.sampled_from(["none", "causal", "rows", "heads", "grouped"]),
    st.integers(16, 3000),
    st.booleans(),
    st.sampled_from([1.0, 30.0]),
    st.sampled_from([None, -math.inf, float(np.finfo(np.float32).min)]),
)
def test_blocks_give_the_same_result(
    shape: tuple[int, int, int, int],
    before: int,
    mask: str,
    score_bytes: int,
    sinks: bool,
    size: float,
    hidden: float | None,
) -> None:
    rows, key_heads, shared, step = shape
    seen, heads = before + step, key_heads * shared
    key = mx.random.key(sum(shape) + before)
    queries = mx.random.normal((rows, heads, step, 8), key=key) * size
    keys = mx.random.normal((rows, key_heads, seen + 3, 8), key=key + 1)[:, :, 2 : 2 + seen]
    values = mx.random.normal((rows, key_heads, seen + 3, 4), key=key + 2)[:, :, 1 : 1 + seen]
    own = None if mask == "none" else "causal" if mask == "causal" else _shown(mask, shape, seen)
    if isinstance(own, mx.array) and hidden is not None:  # numbers that are added to the scores
        own = mx.where(own, mx.random.normal(own.shape, key=key + 4) * size, hidden)
    flat = own.reshape(rows, -1, step, seen) if mask == "grouped" else own
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=flat)
    grouped = view(queries).reshape(rows, key_heads, shared * step, 8)
    ours = attended(grouped, keys, values, own, step, 0.3, score_bytes)
    assert np.allclose(ours.reshape(rows, heads, step, 4), theirs, rtol=1e-3, atol=1e-4)
    given_sinks = mx.random.normal((heads,), key=key + 3) if sinks else None
    theirs = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask=flat, sinks=given_sinks
    )
    fused = fused_in_blocks(queries, keys, values, own, 0.3, given_sinks, score_bytes)
    assert mx.allclose(fused, theirs, rtol=1e-3, atol=1e-4)


def _shown(mask: str, shape: tuple[int, int, int, int], seen: int) -> mx.array:
    rows, key_heads, shared, step = shape
    heads = {"rows": (1,), "heads": (key_heads * shared,), "grouped": (1, 1)}[mask]
    shown = mx.random.uniform(shape=(rows, *heads, step, seen), key=mx.random.key(seen)) < 0.7
    shown[..., 0] = True
    return shown


# 32 heads of a chunk of 512 behind 7,680 tokens: 537 MB of scores in float32.
_PROMPT = """
import json, resource, sys
sys.path.insert(0, {tests!r})
from chairlift.engine.cpu.blas import load_fast_blas
load_fast_blas()
import mlx.core as mx
from mlx_lm.models import llama
from support.tiny import tiny_config
from chairlift.cache.kinds import make_batch
from chairlift.engine.core.acceleration import accelerate
config = tiny_config("llama", layers=1) | {{
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 16384}}
model = llama.Model(llama.ModelArgs.from_dict(config))
mx.eval(model.parameters())
accelerate(model)
cache = make_batch(model)
cache.join(columns={context})
rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def step(tokens):
    with cache.step(tokens):
        logits = model(mx.zeros((1, tokens), mx.int32), cache=cache.layers)[:, -1]
    mx.eval(logits, cache.state)
# Sets the cache as if 7680 tokens had been fed, so that only the last chunk is computed.
step(1)
for layer in cache.attention:
    layer.ring.lengths, layer.ring.cursors = [{context} - 512], [{context} - 512]
cache.offsets = [{context} - 512]
before = rss()
mx.reset_peak_memory()
active = mx.get_active_memory()
step(512)
print(json.dumps([mx.get_peak_memory() - active, rss() - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_a_chunk_after_a_long_context_takes_bounded_memory() -> None:
    code = _PROMPT.format(tests=str(TESTS), context=8192)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arrays, resident = json.loads(done.stdout)
    all_scores = 4 * 32 * 512 * 8192
    # The scores of two blocks, and everything else.
    bound = 2 * SCORE_BYTES + (32 << 20)
    assert bound < all_scores / 4
    assert arrays < bound
    assert resident < bound + (16 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "array"])
def test_attention_by_mlx_takes_bounded_memory(
    sinks: bool, dtype: mx.Dtype, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORE_BYTES", 1 << 20)
    heads, step, seen = 32, 64, 2048
    queries = mx.random.normal((1, heads, step, 4)).astype(dtype)
    keys = mx.random.normal((1, 2, seen, 4)).astype(dtype)
    shown = mx.arange(seen - step, seen)[:, None] >= mx.arange(seen)
    own = mask if mask == "causal" else shown[None, None]
    given_sinks = mx.zeros((heads,), dtype) if sinks else None
    mx.eval(queries, keys, own, given_sinks)
    part = Part(LayerCache(Ring()), queries, keys, keys, own)
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    [mixed] = attention.attend([part], 0.5, given_sinks)
    assert mixed is not None
    mx.eval(mixed)
    # Without blocks: 16 MB in float32, and as much again for each step of the softmax.
    assert mx.get_peak_memory() - active < 6 << 20
    theirs = mx.fast.scaled_dot_product_attention(
        queries, keys, keys, scale=0.5, mask=shown, sinks=given_sinks
    )
    assert mx.allclose(mixed, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("profile", [CPU, METAL])
def test_memory_for_a_step_is_left_free(
    profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, rows, vocabulary in itertools.product(
        (1 << 28, 1 << 30, 1 << 33, 1 << 36), (1, 32, 512), (1000, 152_000)
    ):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        config = EngineConfig(max_rows=rows)
        kv, prefix = memory.plan_kv_memory(config, profile, vocabulary)
        step = memory.step_bytes(config, profile, vocabulary)
        cache = memory.cache_bytes(profile)
        swap = memory.swap_bytes(config, profile) if profile.unified_memory else 0
        assert step >= rows * vocabulary * 42 + profile.attention_bytes
        assert kv >= 0
        assert prefix >= 0
        assert kv + prefix == 0 or kv + prefix + step + cache + swap <= free
        assert cache <= min(profile.cache_bytes, free // 16)
    given = EngineConfig(kv_memory=1 << 30, prefix_cache_bytes=5)
    assert memory.plan_kv_memory(given, profile, 1000) == (1 << 30, 5)


@pytest.mark.parametrize("profile", [CPU, CUDA, METAL], ids=lambda profile: profile.kind)
def test_a_share_of_all_memory_holds_the_weights_and_a_step_too(
    profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, weights = 64 << 30, 5 << 30
    monkeypatch.setattr(memory, "total_memory", lambda: total)
    monkeypatch.setattr(mx, "get_active_memory", lambda: weights)
    for free, share in itertools.product((20 << 30, 40 << 30, 59 << 30), (0.2, 0.5, 1.0)):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        config = EngineConfig(memory_share=share, max_rows=32, swap_memory=1 << 30)
        kv, prefix = memory.plan_kv_memory(config, profile, 32_000)
        reserved = memory.step_bytes(config, profile, 32_000) + memory.cache_bytes(profile)
        reserved += memory.swap_bytes(config, profile) if profile.unified_memory else 0
        room = min(int(total * share) - weights, free) - reserved
        assert kv + prefix == room
        assert prefix == room // 4
    with pytest.raises(ModelError, match=r"utilization 0.05 is 3.4 GB, .* takes 5.4 GB"):
        memory.plan_kv_memory(EngineConfig(memory_share=0.05), profile, 32_000)


def test_an_apple_gpu_computes_short_chunks_without_padding() -> None:
    limits = build_limits(EngineConfig(), METAL, KVGeometry(100), 1000, 1 << 30, 1 << 20)
    assert (limits.max_rows, limits.max_step_tokens) == (64, 576)
    assert limits.prompt_size(33, 0) == (33, 33)
    assert not limits.avoid_partial_prefill
