"""Linear attention with decays in blocks gives what mlx-lm's functions and a loop give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conformance.configs import reason_not_applicable
from conformance.restored import restored
from conformance.weights import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import bailing_moe_linear, ssm
from support.engine.reference import logits_of_prompt

from chairlift.engine.model.layers import decayed
from chairlift.engine.model.layers.decayed import decayed_attention

# The model files of mlx-lm that call these functions. Some cannot be imported, so they are read.
FILES = sorted(
    file.stem
    for file in Path(ssm.__file__).parent.glob("*.py")
    if ("import ssm_update" in file.read_text() or "def recurrent_gla" in file.read_text())
    and not reason_not_applicable(file.stem)
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = bailing_moe_linear.recurrent_gla
    with restored():
        yield
    bailing_moe_linear.recurrent_gla = before


def _random(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32))


def _assert_close(actual: mx.array, expected: mx.array) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = mx.abs(actual - expected).max().item()
    assert difference <= 2e-4 * max(1.0, mx.abs(expected).max().item())


@given(
    st.integers(1, 3),
    st.integers(1, 200),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e4]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_blocks_give_the_loops_results(
    rows: int, tokens: int, groups: int, heads: int, strength: float, begins: bool, seed: int
) -> None:
    """Any sizes, and decays from none to all."""
    rng = np.random.default_rng(seed)
    q, k = (_random(rng, rows, tokens, groups, 7) for _ in range(2))
    v = _random(rng, rows, tokens, groups * heads, 5)
    decays = -strength * rng.exponential(size=(rows, tokens, groups * heads))
    state = None if begins else _random(rng, rows, groups * heads, 7, 5)
    output, after = decayed_attention(q, k, v, mx.array(decays.astype(np.float32)), state)
    held = np.zeros((rows, groups * heads, 7, 5)) if state is None else np.array(state, np.float64)
    q_, k_ = (np.repeat(np.array(x, np.float64), heads, axis=2) for x in (q, k))
    expected = []
    for t in range(tokens):
        added = k_[:, t, :, :, None] * np.array(v, np.float64)[:, t, :, None]
        held = np.exp(decays[:, t, :, None, None]) * held + added
        expected.append(np.einsum("rhk,rhkv->rhv", q_[:, t], held))
    _assert_close(output, mx.array(np.stack(expected, axis=1).astype(np.float32)))
    _assert_close(after, mx.array(held.astype(np.float32)))


def _ssm_arguments(rng: np.random.Generator, rows: int, tokens: int, state: bool) -> list[Any]:
    heads, dim, groups, width = 6, 4, 2, 8
    return [
        _random(rng, rows, tokens, heads, dim),
        mx.log(mx.array(rng.uniform(1, 16, heads).astype(np.float32))),
        _random(rng, rows, tokens, groups, width),
        _random(rng, rows, tokens, groups, width),
        _random(rng, heads),
        _random(rng, rows, tokens, heads),
        _random(rng, heads),
        _random(rng, rows, heads, dim, width) if state else None,
        (0.001, 100.0),
    ]


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 65, 300])
def test_state_space_models(tokens: int, state: bool) -> None:
    arguments = _ssm_arguments(np.random.default_rng(tokens), 3, tokens, state)
    expected = ssm.ssm_attn(*arguments)
    mx.eval(expected)
    assert decayed.install(tiny_model("mamba2"))
    assert hasattr(ssm.ssm_attn, "replaces")
    for actual, right in zip(ssm.ssm_attn(*arguments), expected, strict=True):
        _assert_close(actual, right)


def test_padding_changes_nothing() -> None:
    """Unused tokens at the begin, by a mask, or at the end, by lengths and a mask."""
    assert decayed.install(tiny_model("mamba2"))
    rng = np.random.default_rng(4)
    arguments = _ssm_arguments(rng, 2, 70, True)
    for begin, end in ((0, 50), (20, 70)):
        alone = [x[:, begin:end] if n in (0, 2, 3, 5) else x for n, x in enumerate(arguments)]
        expected, expected_state = ssm.ssm_attn(*alone)
        mask = mx.broadcast_to((mx.arange(70) >= begin) & (mx.arange(70) < end), (2, 70))
        given = {"mask": mask}
        if begin == 0:
            given["lengths"] = mx.array([end] * 2)
        actual, state = ssm.ssm_attn(*arguments, **given)
        _assert_close(actual[:, begin:end], expected)
        _assert_close(state, expected_state)
    nothing = {"mask": mx.zeros((2, 70), mx.bool_), "lengths": mx.array([-3, 0])}
    _assert_close(ssm.ssm_attn(*arguments, **nothing)[1], arguments[7])


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("tokens", [1, 100])
def test_gated_linear_attention(tokens: int, state: bool) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (_random(rng, 2, 4, tokens, 8) for _ in range(3))
    g = -mx.array([0.0, 0.1, 0.5, 3.0])
    h = _random(rng, 2, 4, 8, 8) if state else None
    expected = bailing_moe_linear.recurrent_gla(q, k, v, g, 0.5, h)
    mx.eval(expected)
    assert decayed.install(tiny_model("bailing_moe_linear"))
    assert hasattr(bailing_moe_linear.recurrent_gla, "replaces")
    actual = bailing_moe_linear.recurrent_gla(q=q, k=k, v=v, g=g, scale=0.5, h=h)
    for ours, theirs in zip(actual, expected, strict=True):
        _assert_close(ours, theirs)


def test_there_are_such_files() -> None:
    assert {"mamba2", "falcon_h1", "granitemoehybrid", "bailing_moe_linear"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_models_logits_stay_the_same(name: str) -> None:
    model = tiny_model(name)
    expected = logits_of_prompt(model, 80, 1)
    # bailing_hybrid's own function computes blocks, and stays.
    assert decayed.install(model) == (name != "bailing_hybrid")
    assert (
        mx.abs(logits_of_prompt(model, 80, 1) - expected).max().item()
        <= 1e-3 * mx.abs(expected).max().item()
    )
