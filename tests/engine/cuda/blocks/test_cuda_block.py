"""Transformer blocks replaced by fused ones, with MLX operations instead of the CUDA kernels."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import YarnRoPE
from support.engine.core import build_core
from support.engine.on_cuda import kernels, split_heads
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda.heads import SplitHeads
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits

__all__ = ["kernels"]


def _replaced_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__call__.__module__ == cuda_block.__name__]


def _served(
    model: nn.Module, kind: str, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    geometry, vocabulary, _ = probe(model, kind)
    core = build_core(model, vocabulary, Limits(4, 40, 1 << 24, geometry))
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        core.submit(Submit(str(number), prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while not core.idle:
        for output in core.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
    return tokens


PROMPTS = [[3 + (7 * i + j) % 90 for j in range(5 + 11 * i)] for i in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fused_blocks_give_the_same_tokens(kind: TinyKind, bits: int | None, kernels: None) -> None:
    """In packed steps of rows and prompts, and in steps of rows alone."""
    models = [tiny_model(kind) for _ in range(2)]
    for model in models:
        if bits is not None:
            nn.quantize(model, 32, bits)
    fused, plain = models
    attention.install(fused)
    before = dict(tree_flatten(fused.parameters()))
    cuda_block.install(fused)
    assert len(_replaced_modules(fused)) == len(fused.layers)
    after = dict(tree_flatten(fused.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)
    expected = [solo_tokens(plain, prompt, 12) for prompt in PROMPTS]
    assert _served(fused, kind, PROMPTS, 12) == expected


def test_blocks_with_other_operations_are_not_replaced(kernels: None) -> None:
    """Gemma 3 has a norm of its own, and norms after attention, too."""
    model = tiny_model("gemma3")
    attention.install(model)
    cuda_block.install(model)
    assert not _replaced_modules(model)


@pytest.mark.parametrize("larger", [False, True])
def test_a_rope_that_scales_its_input_is_not_replaced(larger: bool, kernels: None) -> None:
    """With small queries, the scaling hardly changes the logits of the trial's few tokens."""
    model = tiny_model("llama")
    for layer in model.layers:
        layer.self_attn.rope = YarnRoPE(16, scaling_factor=4.0, mscale_all_dim=int(not larger))
        layer.self_attn.q_proj.weight *= 0.01
    attention.install(model)
    cuda_block.install(model)
    assert len(_replaced_modules(model)) == (0 if larger else len(model.layers))


def test_a_wrong_kernel_is_detected(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    monkeypatch.setattr(
        cuda_block,
        "split_heads",
        lambda *given: SplitHeads(*(2 * part for part in split_heads(*given))),
    )
    model = tiny_model("llama")
    attention.install(model)
    cuda_block.install(model)
    assert not _replaced_modules(model)
