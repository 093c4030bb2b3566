"""Tokens of recurrent layers: the kernels give the rules' results, and states change in place."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu.compiled import recurrence
from chairlift.engine.cpu.compiled import recurrent_layers as layer_kernels
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.model.layers.decayed import decayed_attention
from chairlift.engine.model.layers.gated_delta import gated_delta_blocks

pytestmark = pytest.mark.skipif(not recurrence.available(), reason="this CPU has no kernel")

ROWS = st.integers(1, 5)
TOKENS = st.sampled_from([1, 1, 2, 9, 40])
GROUPS = st.integers(1, 3)
SHARE = st.integers(1, 4)
LINES = st.sampled_from([1, 3, 16, 33, 128])
NUMBERS = st.sampled_from([16, 32, 48, 128, 256])
SEEDS = st.integers(0, 1 << 30)


@pytest.fixture(autouse=True, params=[1, 1 << 30], ids=["shared", "alone"])
def _shared(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "MIN_SHARED", request.param)
        yield


def _floats(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.normal(size=shape).astype(np.float32)


def _assert_close(actual: Floats, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


@given(ROWS, TOKENS, GROUPS, SHARE, LINES, NUMBERS, st.booleans(), st.booleans(), SEEDS)
@settings(max_examples=60)
def test_tokens_equal_the_rule(
    rows: int,
    tokens: int,
    groups: int,
    share: int,
    lines: int,
    numbers: int,
    is_delta: bool,
    is_vector: bool,
    seed: int,
) -> None:
    """Any shapes, with a decay of each head or of each number.

    Rows and tokens are to the last bit as they are alone.
    """
    rng = np.random.default_rng(seed)
    heads = groups * share
    state = _floats(rng, rows, heads, lines, numbers)
    k, q = (_floats(rng, rows, tokens, groups, numbers) / numbers**0.5 for _ in range(2))
    v = _floats(rng, rows, tokens, heads, lines)
    decays = np.exp(-rng.exponential(size=(rows, tokens, heads, *[numbers] * is_vector)))
    g = decays.astype(np.float32)
    beta = rng.uniform(size=(rows, tokens, heads)).astype(np.float32) if is_delta else None
    inputs = k, q, v, g, beta
    keys, queries = (np.repeat(x, share, axis=2) for x in (k, q))
    expected, outputs = state.astype(np.float64), []
    for t in range(tokens):
        own = g[:, t, :, None] if is_vector else g[:, t, :, None, None]
        expected = expected * own
        added = v[:, t] - np.einsum("rhln,rhn->rhl", expected, keys[:, t]) if is_delta else v[:, t]
        if beta is not None:
            added = beta[:, t, :, None] * added
        expected = expected + added[..., None] * keys[:, t, :, None]
        outputs.append(np.einsum("rhln,rhn->rhl", expected, queries[:, t]))
    alone = [
        (own := state[r : r + 1].copy(), recurrence.decay(own, *_row(r, *inputs)))
        for r in range(rows)
    ]
    one_by_one = state.copy()
    steps = [
        recurrence.decay(one_by_one, *(None if x is None else x[:, t : t + 1] for x in inputs))
        for t in range(tokens)
    ]
    output = recurrence.decay(state, k, q, v, g, beta)
    assert (one_by_one == state).all()
    assert (np.concatenate(steps, axis=1) == output).all()
    _assert_close(state, expected)
    _assert_close(output, np.stack(outputs, axis=1))
    for row, (own, result) in enumerate(alone):
        assert (own[0] == state[row]).all()
        assert (result[0] == output[row]).all()


def _row(row: int, *arrays: Floats | None) -> list[Floats | None]:
    return [None if x is None else x[row : row + 1] for x in arrays]


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    rng = np.random.default_rng(1)
    state, v = _floats(rng, 3, 2, 4, 16), _floats(rng, 3, 2, 2, 4)
    k, q = (_floats(rng, 3, 2, 1, 16) for _ in range(2))
    state[1, 0, 2, 3] = np.nan
    output = recurrence.decay(state, k, q, v, np.full((3, 2, 2), 0.5, np.float32))
    assert set(np.isnan(output).nonzero()[0]) == {1}
    assert set(np.isnan(state).nonzero()[0]) == {1}


@given(ROWS, TOKENS, GROUPS, SHARE, LINES, NUMBERS, st.booleans(), SEEDS)
@settings(max_examples=30)
def test_layers_give_the_results_of_blocks(
    rows: int,
    tokens: int,
    groups: int,
    share: int,
    lines: int,
    numbers: int,
    is_vector: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    heads = groups * share
    shape = rows, tokens, groups, numbers
    k, q = (mx.array(_floats(rng, *shape) / numbers**0.5) for _ in range(2))
    v = mx.array(_floats(rng, rows, tokens, heads, lines))
    logs = mx.array(-rng.exponential(size=(rows, tokens, heads)).astype(np.float32))
    state = mx.array(_floats(rng, rows, heads, lines, numbers))
    before = np.array(state)
    expected, after = decayed_attention(q, k, v, logs, state.swapaxes(2, 3))
    result = layer_kernels.decayed(q, k, v, mx.exp(logs), state)
    assert result is not None
    _assert_close(view(result[0]), view(expected))
    _assert_close(view(result[1]), view(after.swapaxes(2, 3)))
    g = mx.broadcast_to(mx.exp(logs)[..., None], (rows, tokens, heads, numbers))
    g = g if is_vector else mx.exp(logs)
    beta = mx.array(rng.uniform(size=(rows, tokens, heads)).astype(np.float32))
    for mask in (None, mx.array(rng.uniform(size=(rows, tokens)) < 0.7)):
        expected, after = gated_delta_blocks(q, k, v, g, beta, state, mask)
        result = layer_kernels.gated_delta(q, k, v, g, beta, state, mask)
        assert result is not None
        used = np.ones((rows, tokens), np.bool_) if mask is None else np.array(mask)
        _assert_close(
            view(result[0]) * used[..., None, None], view(expected) * used[..., None, None]
        )
        _assert_close(view(result[1]), view(after))
    assert (np.array(state) == before).all(), "an array that no cache handed out stays as it is"


def test_other_arrays_are_left_to_others() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (mx.array(_floats(rng, 2, 1, 2, 16)) for _ in range(3))
    g, beta = (mx.array(_floats(rng, 2, 1, 2)) for _ in range(2))
    state = mx.array(_floats(rng, 2, 2, 16, 16))
    gated_delta, decayed = layer_kernels.gated_delta, layer_kernels.decayed
    assert decayed(q, k, v, g, state) is not None
    half = q.astype(mx.float16), k.astype(mx.float16), v.astype(mx.float16)
    assert decayed(*half, g, state) is None
    assert decayed(q, k, v, g, state.astype(mx.bfloat16)) is None
    assert decayed(q, k, mx.repeat(v, 2, axis=1), g, state) is None
    odd = q[..., :15], k[..., :15]
    assert decayed(*odd, v, g, state[..., :15]) is None
    assert gated_delta(q, k, v, g, beta, state, mx.ones((2, 2), mx.bool_)) is None
    assert gated_delta(q, k, v, g, mx.repeat(beta, 2, axis=1), state, None) is None
