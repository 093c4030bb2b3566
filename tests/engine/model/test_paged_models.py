"""Model files whose caches can be pages, with NumPy instead of CUDA's kernels."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model
from support.engine.core import build_core
from support.engine.pages import HostPages
from support.engine.reference import solo_tokens

from chairlift.cache.kinds import make_batch, make_pages
from chairlift.cache.pages.memory import can_page
from chairlift.cache.pages.page import step_size
from chairlift.cache.pages.step_parts import PagedAttention
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.selection import SelectedForward, select_forward
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits


def selected(name: str) -> SelectedForward:
    """The way to call a tiny model of a model file, with pages on offer."""
    model = tiny_model(name)
    adapt(model)
    attention.install(model)
    return select_forward(
        model, partial(make_batch, model), partial(make_pages, model, HostPages())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi3", "mixtral"),
        *("gemma2", "deepseek_v2", "minicpm3"),  # capped scores, values shorter than keys
        *("gemma3n", "gemma4_text", "afm7"),  # layers that read another layer's keys
        # Recurrent layers beside attention.
        *("qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"),
    ],
)
def test_common_models_are_served_from_pages(name: str) -> None:
    """Their logits over pages equal those of plain calls; see ``select_forward``."""
    choice = selected(name)
    assert isinstance(choice.forward, PagedForward)
    assert choice.forward.attention is PagedAttention.KERNEL
    assert choice.make_pages is not None


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "llama4"])
def test_other_kinds_of_caches_are_columns(name: str) -> None:
    model = tiny_model(name)
    adapt(model)
    assert not can_page(make_batch(model).kinds)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "glm4_moe_lite", "longcat_flash", "mistral4"),
        *("kimi_linear", "bailing_hybrid", "bailing_moe_v3"),  # beside recurrent layers
    ],
)
def test_latent_attention_has_a_kernel(name: str) -> None:
    choice = selected(name)
    assert isinstance(choice.forward, PagedForward)
    assert choice.forward.attention is PagedAttention.LATENT


@pytest.mark.parametrize("name", ["plamo2", "deepseek_v32"])
def test_other_attention_of_model_files_reads_copies_of_pages(name: str) -> None:
    """Its mask is an array, or another layer with a cache of its own chooses the columns."""
    choice = selected(name)
    assert isinstance(choice.forward, PagedForward)
    assert choice.forward.attention is PagedAttention.DENSE


@pytest.mark.slow
def test_all_steps_have_recurring_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with prompts, too, whatever the lengths of these; the tokens are the same as alone."""
    model = tiny_model("qwen3")
    attention.install(model)
    geometry, vocabulary, _ = probe(model, "qwen3")
    limits = Limits(16, 160, 1 << 24, geometry)
    core = build_core(model, vocabulary, limits, kernels=HostPages())
    sizes: list[int] = []
    call = type(model).__call__

    def recorded(self: Any, tokens: mx.array, *rest: Any, **named: Any) -> mx.array:
        sizes.append(tokens.size)
        return call(self, tokens, *rest, **named)

    monkeypatch.setattr(type(model), "__call__", recorded)
    rng = random.Random(4)
    prompts = [
        [rng.randrange(3, 90) for _ in range(rng.choice([1, 9, 37, 150]))] for _ in range(24)
    ]
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1 + number % 9, seed=0, temperature=0.0)
        core.submit(Submit(str(number), prompt, params))
    while not core.idle:
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert len(set(sizes)) > 4
    assert all(step_size(size) == size for size in sizes)
    monkeypatch.undo()
    for number, prompt in enumerate(prompts):
        got = tokens[str(number)]
        assert got == solo_tokens(model, prompt, 1 + number % 9, got), number
