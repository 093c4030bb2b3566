"""Blocks taken over in few operations, with MLX's own in the place of the CUDA kernels."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import YarnRoPE
from support.engine.core import build_core
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda.heads import Heads, SplitHeads
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.probe import probe
from chairlift.scheduler.limits import Limits


def _split(product: mx.array, positions: mx.array, heads: Heads) -> SplitHeads:
    rows, length, _ = product.shape
    if heads.bias is not None:
        product = product + heads.bias
    apart = product.reshape(rows, length, -1, heads.dim).swapaxes(1, 2)
    ends = [heads.heads, heads.heads + heads.key_heads]
    queries, keys, values = mx.split(apart, ends, axis=1)
    if heads.norms is not None:
        queries = mx.fast.rms_norm(queries, heads.norms.query, heads.norms.eps)
        keys = mx.fast.rms_norm(keys, heads.norms.key, heads.norms.eps)
    turned = (
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
    return SplitHeads(*turned, values)


def _swiglu(product: mx.array) -> mx.array:
    gate, up = mx.split(product, 2, axis=-1)
    return nn.silu(gate) * up


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_block, "split_heads", _split)
    monkeypatch.setattr(cuda_block, "swiglu", _swiglu)


def _taken_over(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__call__.__module__ == cuda_block.__name__]


def _served(model: nn.Module, kind: str, prompts: list[list[int]], most: int) -> list[list[int]]:
    geometry, vocabulary, _ = probe(model, kind)
    core = build_core(model, vocabulary, Limits(4, 40, 1 << 24, geometry))
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=most, seed=0, temperature=0.0)
        core.submit(Submit(str(number), prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while not core.idle:
        for output in core.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
    return tokens


PROMPTS = [[3 + (7 * i + j) % 90 for j in range(5 + 11 * i)] for i in range(6)]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tokens_stay_what_they_were(kind: TinyKind, bits: int | None, kernels: None) -> None:
    """Packed steps of rows and prompts, and steps of rows alone."""
    models = [tiny_model(kind) for _ in range(2)]
    for model in models:
        if bits is not None:
            nn.quantize(model, 32, bits)
    ours, theirs = models
    attention.install(ours)
    before = dict(tree_flatten(ours.parameters()))
    cuda_block.install(ours)
    assert len(_taken_over(ours)) == len(ours.layers)
    after = dict(tree_flatten(ours.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)
    expected = [solo_tokens(theirs, prompt, 12) for prompt in PROMPTS]
    assert _served(ours, kind, PROMPTS, 12) == expected


def test_what_a_block_of_a_model_does_besides_keeps_it_as_it_is(kernels: None) -> None:
    """Gemma-3 has norms behind attention, too, and its own; nothing of it is taken over."""
    model = tiny_model("gemma3")
    attention.install(model)
    cuda_block.install(model)
    assert not _taken_over(model)


@pytest.mark.parametrize("larger", [False, True])
def test_what_is_turned_may_not_become_larger(larger: bool, kernels: None) -> None:
    """Where queries are small it hardly changes what comes of the few tokens of a trial."""
    model = tiny_model("llama")
    for layer in model.layers:
        layer.self_attn.rope = YarnRoPE(16, scaling_factor=4.0, mscale_all_dim=int(not larger))
        layer.self_attn.q_proj.weight *= 0.01
    attention.install(model)
    cuda_block.install(model)
    assert len(_taken_over(model)) == (0 if larger else len(model.layers))


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    monkeypatch.setattr(
        cuda_block, "split_heads", lambda *given: SplitHeads(*(2 * part for part in _split(*given)))
    )
    model = tiny_model("llama")
    attention.install(model)
    cuda_block.install(model)
    assert not _taken_over(model)
