"""Trials of mixtures of experts: rounding in the router is no error, anything else is."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.weights import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from support.engine.pages import HostPages

from chairlift.cache.kinds import make_batch, make_pages
from chairlift.engine.model import attention
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.forward import Forward
from chairlift.engine.model.selection import TOLERANCE, select_forward, trial_logits
from chairlift.engine.model.trials.expert_choices import ExpertChoices, with_experts
from chairlift.engine.model.trials.trial import within_rms


@st.composite
def choices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two choices of as many different experts for each of some tokens."""
    tokens, count = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    experts = draw(st.integers(count, 12))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    pair = [np.array([rng.permutation(experts)[:count] for _ in range(tokens)]) for _ in range(2)]
    return pair[0].astype(np.uint32), pair[1].astype(np.uint32)


@given(choices())
def test_the_wanted_experts_are_used_and_none_moves(pair: tuple[np.ndarray, np.ndarray]) -> None:
    own, wanted = pair
    result = np.array(with_experts(mx.array(own), mx.array(wanted)))
    for before, want, after in zip(own, wanted, result, strict=True):
        assert sorted(after) == sorted(want)
        assert all(a == b for a, b in zip(after, before, strict=True) if b in want)


@pytest.fixture(params=["gpt_oss", "qwen3_moe", "mixtral"])
def model(request: pytest.FixtureRequest) -> Any:
    made = tiny_model(request.param)
    adapt(made)
    attention.install(made)
    return made


def test_another_run_with_the_same_experts_gives_the_same(model: Any) -> None:
    """The runs differ in how many tokens a call has."""
    experts, make_cache = ExpertChoices(), partial(make_batch, model)
    expected = experts.record(lambda: trial_logits(Forward(model, None, packs=False), make_cache))
    packed = partial(trial_logits, Forward(model, None, packs=True), make_cache)
    for result in (experts.repeat(packed), packed()):
        assert mx.allclose(result, expected, rtol=1e-3, atol=1e-4).item()


def test_a_calculation_with_padding_chooses_by_itself(model: Any) -> None:
    experts, make_cache = ExpertChoices(), partial(make_batch, model)
    expected = experts.record(lambda: trial_logits(Forward(model, None, packs=False), make_cache))
    padded = Forward(model, None, packs=True, multiple=16)
    result = experts.repeat(partial(trial_logits, padded, make_cache))
    assert mx.allclose(result, expected, rtol=1e-3, atol=1e-4).item()


class PagesBesideTies(HostPages):
    """Attention with pages that is off by ``shift``; other ways to call a model do not use it.

    Attributes:
        used: whether it has been called.
    """

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.used = False

    def attend(self, *args: Any) -> mx.array:
        self.used = True
        return super().attend(*args) + self.shift


class Ties(nn.Module):
    """A router whose scores are nearly equal; the largest are others once pages are used."""

    def __init__(self, experts: int, pages: PagesBesideTies) -> None:
        super().__init__()
        self._experts = experts
        self._pages = pages

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.arange(self._experts) * (1e-5 if self._pages.used else -1e-5)
        return mx.broadcast_to(scores, (*x.shape[:-1], self._experts))


@pytest.mark.parametrize(("shift", "paged"), [(0.0, True), (0.5, False)])
def test_other_experts_of_equal_score_are_no_error(shift: float, paged: bool) -> None:
    model, pages = tiny_model("qwen3_moe"), PagesBesideTies(shift)
    for layer in model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate = Ties(layer.mlp.gate.weight.shape[0], pages)
    adapt(model)
    attention.install(model)
    pages_of = partial(make_pages, model, pages)
    choice = select_forward(model, partial(make_batch, model), pages_of)
    # Otherwise the model's own attention reads copies of what is in the pages.
    assert choice.forward.splits != paged
    # Without the recorded experts, even attention that is right would be refused.
    pages.used = False
    plain = trial_logits(Forward(model, None, packs=False), choice.make_cache)
    pages.used = True
    other = trial_logits(Forward(model, None, packs=False), choice.make_cache)
    assert not within_rms(TOLERANCE)(other, plain)
