"""The gated delta rule in blocks gives what mlx-lm's loop over tokens gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.models.gated_delta
import numpy as np
import pytest
from conformance.restored import restored
from conformance.weights import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as mlx_lm_rule
from mlx_lm.models.cache import make_prompt_cache
from support.engine.reference import logits_of_prompt

from chairlift.engine.model.layers import gated_delta
from chairlift.engine.model.layers.gated_delta import (
    MIN_TOKENS,
    gated_delta_blocks,
    inverse_unit_lower,
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restored():
        yield


class Arguments(NamedTuple):
    """The arguments of the rule."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array | None
    mask: mx.array | None

    def part(self, tokens: slice, state: mx.array | None) -> Arguments:
        arrays = [array[:, tokens] for array in self[:5]]
        return Arguments(*arrays, state, None if self.mask is None else self.mask[:, tokens])


@st.composite
def arguments(draw: st.DrawFn) -> Arguments:
    """Any sizes, decays from 0 to 1, betas up to 2, and keys that may all be the same."""
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 150))
    key_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    key_dim, value_dim = draw(st.sampled_from([8, 16, 40])), draw(st.integers(1, 20))
    heads = key_heads * groups
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    q, k = (rng.normal(size=(rows, tokens, key_heads, key_dim)) for _ in range(2))
    if draw(st.booleans()):
        k[:] = k[:, :1]
    for x in (q, k):
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
    decays = (rows, tokens, heads, key_dim) if draw(st.booleans()) else (rows, tokens, heads)
    strength = draw(st.sampled_from([0.0, 0.01, 0.3, 3.0, 30.0, 1000.0]))
    g = np.exp(-strength * rng.exponential(size=decays))
    g[rng.random(decays) < draw(st.sampled_from([0.0, 0.2]))] = draw(st.sampled_from([0.0, 1.0]))
    beta = rng.uniform(0, draw(st.sampled_from([0.0, 1.0, 2.0])), (rows, tokens, heads))
    state = rng.normal(size=(rows, heads, value_dim, key_dim)) if draw(st.booleans()) else None
    mask = rng.random((rows, tokens)) < 0.7 if draw(st.booleans()) else None
    v = rng.normal(size=(rows, tokens, heads, value_dim))
    arrays = [mx.array(x.astype(np.float32)) for x in (q, k, v, g, beta)]
    return Arguments(
        *arrays,
        None if state is None else mx.array(state.astype(np.float32)),
        None if mask is None else mx.array(mask),
    )


def _assert_same(actual: Any, expected: Any, mask: mx.array | None) -> None:
    """Compares outputs, where there is a mask, and states."""
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        difference = mx.abs(ours - theirs)
        if number == 0 and mask is not None:
            difference = mx.where(mask[..., None, None], difference, 0)
        assert difference.max().item() <= 2e-4 * max(1.0, mx.abs(theirs).max().item())


@pytest.mark.slow
@given(arguments())
def test_blocks_give_the_loops_results(given: Arguments) -> None:
    _assert_same(gated_delta_blocks(*given), mlx_lm_rule.gated_delta_ops(*given), given.mask)


@pytest.mark.slow
@given(arguments(), st.data())
def test_a_prompt_may_be_cut_anywhere(given: Arguments, data: st.DataObject) -> None:
    tokens = given.q.shape[1]
    cut = data.draw(st.integers(1, tokens))
    first, state = gated_delta_blocks(*given.part(slice(0, cut), given.state))
    outputs = [first]
    if cut < tokens:
        rest, state = gated_delta_blocks(*given.part(slice(cut, tokens), state))
        outputs.append(rest)
    whole = gated_delta_blocks(*given)
    _assert_same((mx.concatenate(outputs, axis=1), state), whole, given.mask)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_types_are_kept(dtype: mx.Dtype) -> None:
    x = mx.ones((1, 9, 2, 8), dtype)
    output, state = gated_delta_blocks(x, x, x, mx.ones((1, 9, 2)), mx.ones((1, 9, 2), dtype))
    assert (output.dtype, state.dtype) == (dtype, mx.float32)
    _, state = gated_delta_blocks(
        x, x, x, mx.ones((1, 9, 2)), mx.ones((1, 9, 2)), state.astype(dtype)
    )
    assert state.dtype == dtype


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("entry", [1.0, -1.0, 2.0])
def test_the_inverse_is_exact_where_a_power_series_is_not(size: int, entry: float) -> None:
    """All entries alike: the powers of such a matrix have huge entries."""
    lower = mx.tril(mx.full((3, size, size), entry), -1)
    inverse = np.array(inverse_unit_lower(lower), np.float64)
    expected = np.linalg.inv(np.eye(size) + np.array(lower, np.float64))
    assert np.abs(inverse - expected).max() <= 1e-5 * np.abs(expected).max()


def _files() -> list[str]:
    """The model files of mlx-lm with this rule. Some files cannot be imported, so they are read."""
    files = Path(mlx_lm_rule.__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if "import gated_delta_update" in file.read_text())


FILES = _files()


def test_there_are_such_files() -> None:
    assert {"qwen3_next", "qwen3_5", "kimi_linear"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_models_logits_stay_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    expected = logits_of_prompt(model, 75, 5)
    calls: list[int] = []

    def counted(q: mx.array, *arguments: Any) -> Any:
        calls.append(q.shape[1])
        return gated_delta_blocks(q, *arguments)

    monkeypatch.setattr(gated_delta, "gated_delta_blocks", counted)
    assert gated_delta.install(model)
    assert gated_delta.install(model), "once more changes nothing"
    actual = logits_of_prompt(model, 75, 5)
    assert set(calls) == {70, 5}
    assert mx.abs(actual - expected).max().item() <= 1e-3 * mx.abs(expected).max().item()


def test_few_tokens_are_computed_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_next")
    assert gated_delta.install(model)
    monkeypatch.setattr(gated_delta, "gated_delta_blocks", None)
    model(mx.array([[5] * (MIN_TOKENS - 1)]), cache=make_prompt_cache(model))
    with pytest.raises(TypeError):
        model(mx.array([[5] * MIN_TOKENS]), cache=make_prompt_cache(model))


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("states", [None, 3])
def test_mlx_vlm_gets_the_states_that_it_asks_for(states: int | None, by_name: bool) -> None:
    rule = mlx_vlm.models.gated_delta
    names = {"gated_delta_update": rule.gated_delta_update, "nn": nn}
    exec("class Layer(nn.Module):\n    def __call__(self): ...", names)
    layer: Any = names["Layer"]
    original = rule.gated_delta_ops
    q, v = mx.random.normal((1, 9, 2, 8)), mx.random.normal((1, 9, 2, 4))
    arguments = [q, q, v, mx.full((1, 9, 2), 0.5), mx.full((1, 9, 2), 0.3), mx.ones((1, 2, 4, 8))]
    expected = original(*arguments, None, states)
    assert gated_delta.install(layer())
    assert rule.gated_delta_ops is not original
    if by_name:
        actual = rule.gated_delta_ops(*arguments, mask=None, state_steps=states)
    else:
        actual = rule.gated_delta_ops(*arguments, None, states)
    assert len(actual) == len(expected) == (2 if states is None else 3)
    for ours, theirs in zip(actual, expected, strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5).item()


def test_a_kernel_computes_what_it_takes() -> None:
    model = tiny_model("qwen3_next")
    tokens = mx.array([[3 + number % 50 for number in range(9)]])
    expected = model(tokens, cache=make_prompt_cache(model))
    taken: list[int] = []

    def kernel(*arguments: Any) -> tuple[mx.array, mx.array] | None:
        taken.append(len(taken))
        # Every other call, so that both ways are tried.
        return mlx_lm_rule_loop(*arguments) if len(taken) % 2 else None

    mlx_lm_rule_loop = mlx_lm_rule.gated_delta_ops
    gated_delta.install(model, kernel)
    actual = model(tokens, cache=make_prompt_cache(model))
    assert len(taken) > 1
    assert mx.allclose(actual, expected, rtol=1e-3, atol=1e-4).item()


def test_a_model_without_the_rule_is_left_alone() -> None:
    before = mlx_lm_rule.gated_delta_ops
    assert not gated_delta.install(tiny_model("llama"))
    assert mlx_lm_rule.gated_delta_ops is before
