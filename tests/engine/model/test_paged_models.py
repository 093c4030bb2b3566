"""Model files whose caches can be pages, with NumPy instead of CUDA's kernels."""

from __future__ import annotations

from functools import partial

import pytest
from conformance.weights import tiny_model
from support.engine.pages import HostPages

from chairlift.cache.kinds import layer_kinds, make_batch, make_pages
from chairlift.cache.pages.memory import can_page
from chairlift.engine.model import attention
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.paged_forward import PagedForward
from chairlift.engine.model.selection import SelectedForward, select_forward


def selected(name: str) -> SelectedForward:
    """The way to call a tiny model of a model file, with pages on offer."""
    model = tiny_model(name)
    adapt(model)
    attention.install(model)
    return select_forward(
        model, partial(make_batch, model), partial(make_pages, model, HostPages())
    )


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi3", "mixtral"),
        *("gemma3n", "gemma4_text", "afm7"),  # layers that read another layer's keys
    ],
)
def test_common_models_are_served_from_pages(name: str) -> None:
    """Their logits over pages equal those of plain calls; see ``select_forward``."""
    choice = selected(name)
    assert isinstance(choice.forward, PagedForward)
    assert choice.make_pages is not None


@pytest.mark.parametrize("name", ["qwen3_next", "rwkv7", "llama4"])
def test_other_kinds_of_caches_are_columns(name: str) -> None:
    model = tiny_model(name)
    adapt(model)
    assert not can_page(layer_kinds(model))


def test_latent_attention_is_served_from_columns() -> None:
    """It adds a part of its scores as a mask, which pages do not have."""
    choice = selected("deepseek_v3")
    assert choice.make_pages is None
    assert not isinstance(choice.forward, PagedForward)
