"""Samples stay in the vocabulary for any parameters and logits, and rows are independent."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.core.checks import MAX_REAL, check_params
from chairlift.engine.errors import RowFailed
from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.choice import SamplingMode
from chairlift.engine.sampling.draw import PARTS, chosen_part, sample_categorical
from chairlift.engine.sampling.logprobs import lazy_top_logprobs, top_logprobs
from chairlift.engine.sampling.masks import allow, free
from chairlift.engine.sampling.outcomes import NO_CHOICE, NONFINITE, tokens_of
from chairlift.engine.sampling.sampler import Sampled, Sampler, SamplerRow

# A multiple of the vector width, so that a row is rounded alike at any place of a batch.
VOCABULARY = 64
SUBNORMAL = (5e-324, 1e-320, 1e-45, 1e-40, 1.17549435e-38, 1e-38, 1e-30, 1e-10, 1e-7)
SHARES = st.one_of(st.sampled_from((*SUBNORMAL, 0.5, 0.9999999, 1.0)), st.floats(0, 1))
PENALTIES = st.one_of(st.sampled_from((0.0, -0.0, 2.0, -2.0, MAX_REAL, -MAX_REAL, *SUBNORMAL)))
TOKENS = st.integers(0, VOCABULARY - 1)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    drawn = SamplingParams(
        max_tokens=draw(st.sampled_from((0, 1, 2**31 - 1))),
        seed=draw(st.sampled_from((0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 12345))),
        min_tokens=draw(st.sampled_from((0, 1, 2**31 - 1))),
        temperature=draw(
            st.one_of(
                st.sampled_from((*SUBNORMAL, 0.0, 9.99e-6, 1e-5, 1.01e-5, 1.0, 2.0, MAX_REAL)),
                st.floats(0, 2),
            )
        ),
        top_k=draw(st.sampled_from((0, 1, 2, VOCABULARY - 1, VOCABULARY, 2**31 - 1))),
        top_p=draw(SHARES),
        min_p=draw(SHARES),
        repetition_penalty=draw(
            st.one_of(
                st.sampled_from((1 / MAX_REAL, 0.01, 1.0, 100.0, MAX_REAL)), st.floats(0.01, 100)
            )
        ),
        presence_penalty=draw(PENALTIES),
        frequency_penalty=draw(PENALTIES),
        logit_bias=draw(
            st.dictionaries(TOKENS, st.sampled_from((100.0, -100.0, MAX_REAL, -MAX_REAL, 5e-324)))
        ),
        logprobs=draw(st.sampled_from((None, 0, 1, 20))),
        stop_token_ids=tuple(draw(st.lists(st.one_of(TOKENS, st.just(2**31 - 1)), max_size=70))),
    )
    check_params(drawn, VOCABULARY)
    return drawn


@st.composite
def logits(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """A model's logits of one row: of any finite size, with ties, and with -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from((0.0, 1e-45, 1e-30, 1.0, 8.0, 1e4, 6.5e4, 1e30, 1.7e38)))
    row = rng.normal(0, 1, VOCABULARY).clip(-2, 2) * size
    if draw(st.booleans()):
        row = np.sign(row) * size
    ruled_out = rng.random(VOCABULARY) < draw(st.sampled_from((0.0, 0.0, 0.5, 0.97)))
    ruled_out[rng.integers(VOCABULARY)] = False
    row[ruled_out] = -np.inf
    return row.astype(np.float32)


@st.composite
def rows(draw: st.DrawFn) -> tuple[SamplerRow, npt.NDArray[np.float32], list[int] | None]:
    """A row, its logits, and the tokens that a grammar allows (None: all)."""
    parameters = draw(params())
    prompt = draw(st.lists(TOKENS, max_size=5))
    output = draw(st.lists(TOKENS, max_size=5))
    allowed = draw(st.one_of(st.none(), st.lists(TOKENS, max_size=4)))
    return SamplerRow(parameters, prompt, output), draw(logits()), allowed


Row = tuple[SamplerRow, npt.NDArray[np.float32], list[int] | None]


def sampled(batch: list[Row]) -> Sampled:
    sampler = Sampler(VOCABULARY)
    sampler.rearrange([], [row for row, _, _ in batch])
    masks = None
    if any(allowed is not None for _, _, allowed in batch):
        masks = free(len(batch), VOCABULARY)
        for bits, (_, _, allowed) in zip(masks, batch, strict=True):
            if allowed is not None:
                bits[:] = 0
                for token in allowed:
                    allow(bits, token)
    stacked = mx.array(np.stack([row_logits for _, row_logits, _ in batch]))
    return sampler.sample(stacked, [len(row.output) for row, _, _ in batch], masks)


BROKEN = (
    np.full(VOCABULARY, np.nan, np.float32),
    np.full(VOCABULARY, -np.inf, np.float32),
    np.where(np.arange(VOCABULARY) == 7, np.inf, 0).astype(np.float32),
    np.where(np.arange(VOCABULARY) == 63, np.nan, 5).astype(np.float32),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(rows(), min_size=1, max_size=5),
    broken=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(BROKEN)), max_size=2),
)
def test_rows_sample_allowed_tokens_independently(
    batch: list[Row], broken: list[tuple[int, Any]]
) -> None:
    """Rows that are not finite do not change the tokens of others."""
    expected = [outcome_alone(row) for row in batch]
    all_rows: list[Row] = list(batch)
    for place, values in broken:
        all_rows.insert(place, (batch[0][0], values, batch[0][2]))
        expected.insert(place, NONFINITE)
    result = sampled(all_rows)
    assert result.outcomes.tolist() == expected
    tokens: Any = result.tokens.tolist()
    assert [max(outcome, 0) for outcome in expected] == tokens
    for outcome, (_, row, allowed) in zip(expected, all_rows, strict=True):
        if outcome == NONFINITE:
            assert not np.isfinite(row.max()) or np.isnan(row).any()
        elif outcome == NO_CHOICE:
            assert allowed is not None
            assert not np.isfinite(row[allowed]).any() if allowed else True
        else:
            assert 0 <= outcome < VOCABULARY
            assert np.isfinite(row[outcome])
            assert allowed is None or outcome in allowed


def outcome_alone(row: Row) -> int:
    result = sampled([row])
    outcomes: Any = result.outcomes.tolist()
    return int(outcomes[0])


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1e-38, 1e-10, 9.99e-6])
@pytest.mark.parametrize("more", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {}])
def test_a_tiny_temperature_is_greedy(temperature: float, more: dict[str, Any]) -> None:
    """1e-40 with a filter gave tokens outside the vocabulary, and the next step crashed."""
    parameters = SamplingParams(max_tokens=4, seed=1, temperature=temperature, **more)
    values = np.random.default_rng(2).normal(0, 3, VOCABULARY).astype(np.float32)
    assert outcome_alone((SamplerRow(parameters, (1,), ()), values, None)) == values.argmax()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_a_small_temperature_samples_the_likeliest_token(temperature: float) -> None:
    """Even if the logits divided by the temperature overflow float32."""
    parameters = SamplingParams(max_tokens=4, seed=1, temperature=temperature, top_p=0.9, top_k=9)
    values = np.linspace(-3e38, 3e38, VOCABULARY, dtype=np.float32)
    assert outcome_alone((SamplerRow(parameters, (1,), ()), values, None)) == VOCABULARY - 1


@settings(max_examples=200, deadline=None)
@given(
    shares=st.lists(
        st.lists(st.sampled_from((0.0, 1e-45, 1e-30, 1e-9, 0.3, 1.0)), min_size=16, max_size=16),
        min_size=1,
        max_size=4,
    ),
    noise=st.lists(st.floats(-0.4, 0.4), min_size=16, max_size=16),
    at=st.sampled_from((0.0, 1e-45, 0.1, 0.5, 0.999, 1 - 2**-24)),
)
def test_inexact_cumulative_sums_choose_no_part_without_weight(
    shares: list[list[float]], noise: list[float], at: float
) -> None:
    """A GPU's cumulative sums have rounding errors; these are much larger."""
    parts = np.array(shares, np.float32)
    sums = (parts.cumsum(axis=1) + np.array(noise, np.float32)).astype(np.float32)
    chosen = np.array(chosen_part(mx.array(parts), mx.array(sums), mx.array(sums[:, -1:] * at)))
    assert (chosen >= 0).all()
    assert (chosen < PARTS).all()
    weights = parts[np.arange(len(parts)), chosen]
    assert ((weights > 0) | (parts.max(axis=1) == 0)).all()


@settings(max_examples=100, deadline=None)
@given(
    vocabulary=st.sampled_from((1, 2, 15, 16, 17, 31, 33, 64, 259)),
    seed=st.integers(0, 2**32),
    value=st.sampled_from((0.0, math.nan, math.inf, 1e-45, 1e-38, 1.0)),
)
def test_samples_of_any_weights_are_in_the_vocabulary(
    vocabulary: int, seed: int, value: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random((8, vocabulary)) < 0.9, value, 0.0).astype(np.float32)
    keys = rng.integers(0, 2**32, (8, 2), dtype=np.uint32)
    tokens = np.array(sample_categorical(mx.array(weights), mx.array(keys)))
    assert (tokens >= 0).all()
    assert (tokens < vocabulary).all()
    if math.isfinite(value) and value > 0:
        sampled_weights = weights[np.arange(8), tokens]
        assert ((sampled_weights > 0) | (weights.max(axis=1) == 0)).all()


def test_outcomes_read_from_the_device_are_checked() -> None:
    assert tokens_of([0, 9], 10) == [0, 9]
    for outcome, reason in ((10, "bad_token"), (-3, "bad_token"), (NONFINITE, "nonfinite_logits")):
        with pytest.raises(RowFailed) as raised:
            tokens_of([1, outcome], 10)
        assert raised.value.reason == reason


def test_log_probabilities_of_tokens_with_infinite_logits() -> None:
    values = mx.array([[0.0, -mx.inf, 1.0, -mx.inf]])
    scored = top_logprobs(values, mx.array([1]), 4)
    assert scored.chosen.tolist() == [-math.inf]
    assert scored.top_ids.tolist()[0][:2] == [2, 0]
    assert not np.isnan(np.array(scored.top)).any()


@pytest.mark.parametrize("call", [top_logprobs, lazy_top_logprobs])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("size", [0.0, 1.0, 50.0, 1e4, 1e6, 1e30, -1e4, -3.3e38])
def test_log_probabilities_are_exact_for_logits_of_any_size(call: Any, k: int, size: float) -> None:
    """Two tokens at 1e30 had a log-probability of 0 each."""
    values = np.full((2, VOCABULARY), -np.inf, np.float32)
    values[0, [3, 9, 40]] = size
    values[1, [5, 6, 50]] = np.float32(size) * np.array([0.99, 0.995, 1], np.float32)
    wide = values.astype(np.float64)
    below = wide - wide.max(axis=1, keepdims=True)
    expected = below - np.log(np.exp(below).sum(axis=1, keepdims=True))
    scored = call(mx.array(values), mx.array([9, 6]), k)
    assert np.array(scored.chosen) == pytest.approx(expected[[0, 1], [9, 6]], rel=1e-5)
    ids = np.array(scored.top_ids)
    descending = np.sort(values, axis=1)[:, : -k - 1 : -1]
    assert np.array_equal(np.take_along_axis(values, ids.astype(np.int64), axis=1), descending)
    top = np.take_along_axis(expected, ids.astype(np.int64), axis=1)
    assert np.array(scored.top) == pytest.approx(top, rel=1e-5)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("size", [1e30, 1.5e38, 3.3e38])
@pytest.mark.parametrize("repetition", [1 / MAX_REAL, 0.5, 1.0, 2.0, MAX_REAL])
@pytest.mark.parametrize("more", [0.0, MAX_REAL, -MAX_REAL])
def test_penalties_leave_finite_logits_finite(
    lazy: bool, size: float, repetition: float, more: float
) -> None:
    """And the logits of other tokens and of other rows as they are."""
    penalized = SamplingParams(
        *(4, 1),
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=more,
        frequency_penalty=more,
    )
    ascending = np.linspace(0.5, 1, VOCABULARY, dtype=np.float32) * np.float32(size)
    sampler = Sampler(VOCABULARY, mode=SamplingMode(lazy=lazy))
    every = range(VOCABULARY)
    free_row = SamplerRow(SamplingParams(4, 1, temperature=0.0), every, every)
    all_seen = SamplerRow(penalized, every, every)
    none_seen = SamplerRow(penalized, (0,), (0,))
    sampler.rearrange([], [free_row, all_seen, all_seen, none_seen])
    values = np.stack([ascending, ascending, -ascending, ascending])
    outcomes: Any = sampler.sample(mx.array(values), [VOCABULARY] * 4).outcomes.tolist()
    assert min(outcomes) >= 0
    # A penalty below 1 may make a token that was seen likelier than the others.
    expected = [VOCABULARY - 1, VOCABULARY - 1] if repetition >= 1 else [VOCABULARY - 1]
    assert [outcomes[0], outcomes[3]][: len(expected)] == expected
