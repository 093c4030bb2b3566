"""Sampling: each parameter against a plain NumPy implementation of its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.choice import SamplingMode, TokenChoice
from chairlift.engine.sampling.draw import sample_categorical
from chairlift.engine.sampling.filters import SMALL_TOP_K, halved_thresholds, small_thresholds
from chairlift.engine.sampling.host.filters import threshold
from chairlift.engine.sampling.logprobs import lazy_top_logprobs, top_logprobs
from chairlift.engine.sampling.sampler import Sampler, SamplerRow
from chairlift.engine.sampling.top import largest

VOCABULARY = 60


def _row(prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: Any) -> SamplerRow:
    settings_ = {"max_tokens": 100, "seed": 0, "temperature": 0.0} | params
    return SamplerRow(SamplingParams(**settings_), prompt, output)


def _sampler(*rows: SamplerRow) -> Sampler:
    sampler = Sampler(VOCABULARY)
    sampler.rearrange([], rows)
    return sampler


def _host_thresholds(weights: mx.array, *columns: mx.array) -> mx.array:
    """As ``filters.thresholds``, by the filters of a CPU."""
    rows = zip(
        np.nan_to_num(np.array(weights)),
        *(np.array(column)[:, 0] for column in columns),
        strict=True,
    )
    found = [[max(threshold(row, int(k), float(p)), float(m))] for row, k, p, m in rows]
    return mx.array(found, mx.float32)


def _logits(seed: int, rows: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)), mx.float32)


@pytest.mark.parametrize("thresholds", [halved_thresholds, _host_thresholds])
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_keep_the_tokens_of_their_definitions(
    thresholds: Callable[..., mx.array], seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCABULARY)
    weights = np.exp(logits - logits.max()).astype(np.float32)
    column = [mx.array([[value]], mx.float32) for value in (top_k, top_p, min_p)]
    least = thresholds(mx.array(weights)[None], *column).item()
    order = np.argsort(-weights)
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        mass = np.cumsum(weights[kept]) / weights[kept].sum()
        kept = kept[: int(np.searchsorted(mass, min(top_p, mass[-1]) * (1 - 1e-6))) + 1]
    kept = kept[weights[kept] >= np.float32(min_p)]
    loose = set(np.flatnonzero(weights >= least * (1 - 1e-4)))
    tight = set(np.flatnonzero(weights >= least * (1 + 1e-4)))
    assert tight <= set(kept) <= loose


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([VOCABULARY, 5000]),
    scale=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    broken=st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
    rows=st.lists(
        st.tuples(st.integers(0, VOCABULARY + 5), st.floats(0, 1), st.floats(0, 1)), min_size=1
    ),
)
def test_the_cpu_keeps_the_tokens_that_other_devices_keep(
    seed: int,
    vocabulary: int,
    scale: float,
    broken: list[int],
    rows: list[tuple[int, float, float]],
) -> None:
    logits = np.random.default_rng(seed).normal(0, scale, (len(rows), vocabulary))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    weights[0, broken] = np.nan
    columns = [mx.array([[row[kind]] for row in rows], mx.float32) for kind in range(3)]
    halved = np.array(halved_thresholds(mx.array(weights), *columns))
    host = np.array(_host_thresholds(mx.array(weights), *columns))
    one, other = ((weights >= each * (1 - 1e-5)).sum(axis=1) for each in (halved, host))
    # A sum that is rounded differently may need one token more or less.
    assert np.all(abs(one - other) <= 1 if scale else one == other)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 5, 64, 65, 1000]),
    scale=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    rows=st.lists(
        st.tuples(
            st.integers(1, SMALL_TOP_K), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.floats(0, 0.3)
        ),
        min_size=1,
    ),
)
def test_a_small_top_k_keeps_the_same_tokens(
    seed: int, vocabulary: int, scale: float, rows: list[tuple[int, float, float]]
) -> None:
    logits = np.random.default_rng(seed).normal(0, scale, (len(rows), vocabulary))
    # As with logits of 16 bits, many tokens tie.
    logits = np.round(logits * 4) / 4
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    columns = [mx.array([[row[kind]] for row in rows], mx.float32) for kind in range(3)]
    largest = max(row[0] for row in rows)
    small = np.array(small_thresholds(mx.array(weights), *columns, largest))
    host = np.array(_host_thresholds(mx.array(weights), *columns))
    for own, one, other in zip(weights, small, host, strict=True):
        # A sum that is rounded differently may need one weight more or less.
        kept, expected = (np.unique(own[own >= least * (1 - 1e-5)]) for least in (one, other))
        assert abs(len(kept) - len(expected)) <= 1


def test_greedy_is_the_argmax() -> None:
    logits = _logits(1, rows=5)
    sampled = _sampler(*[_row(seed=i) for i in range(5)]).sample(logits, [0] * 5)
    assert sampled.tokens.tolist() == mx.argmax(logits, axis=-1).tolist()
    assert sampled.logprobs is None


def test_draws_follow_the_distribution() -> None:
    logits = mx.broadcast_to(mx.log(mx.array([0.5, 0.25, 0.15, 0.1])), (4000, 4))
    sampler = Sampler(4)
    sampler.rearrange([], [_row(seed=i, temperature=1.0) for i in range(4000)])
    counts = np.bincount(sampler.sample(logits, [0] * 4000).tokens.tolist(), minlength=4) / 4000
    assert counts == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


@pytest.mark.slow
def test_rounding_rarely_changes_a_sample() -> None:
    """With many unlikely tokens; sampling by cumulative sums changed 18 of 400 samples."""
    vocabulary, count = 49_152, 400
    rng = np.random.default_rng(0)
    logits = -1.1 * np.log(rng.permutation(vocabulary) + 3.0)
    perturbed = logits + rng.normal(0, 7e-5, vocabulary)
    sampler = Sampler(vocabulary)
    sampler.rearrange([], [_row(seed=i, temperature=1.0) for i in range(count)])
    one, other = (
        np.array(
            sampler.sample(mx.array(row[None].repeat(count, 0), mx.float32), [3] * count).tokens
        )
        for row in (logits, perturbed)
    )
    assert (one != other).sum() <= 2
    assert len(set(one.tolist())) > 50


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), vocabulary=st.integers(1, 70), share=st.floats(0.0, 1.0))
def test_tokens_without_weight_are_never_sampled(seed: int, vocabulary: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((50, vocabulary)) * (rng.random((50, vocabulary)) < share)
    weights[np.arange(50), rng.integers(0, vocabulary, 50)] = 1.0
    keys = mx.array(rng.integers(0, 2**32, (50, 2), dtype=np.uint32))
    tokens = np.array(sample_categorical(mx.array(weights, mx.float32), keys))
    assert tokens.max() < vocabulary
    assert (weights[np.arange(50), tokens] > 0).all()


def test_temperature_sharpens() -> None:
    logits = mx.broadcast_to(mx.log(mx.array([0.6, 0.4])), (2000, 2))
    sampler = Sampler(2)
    sampler.rearrange([], [_row(seed=i, temperature=0.25) for i in range(2000)])
    share = sum(sampler.sample(logits, [0] * 2000).tokens.tolist()) / 2000
    assert share == pytest.approx(0.4**4 / (0.4**4 + 0.6**4), abs=0.03)


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    logits = _logits(3) * 0.3
    mine = _row(seed=11, temperature=1.0, top_p=0.9)

    def draws(before: int, after: int) -> list[int]:
        rows = [_row(seed=99 + i, temperature=1.5, top_k=i) for i in range(before + after)]
        sampler = _sampler(*rows[:before], mine, *rows[before:])
        count = before + after + 1
        batch = mx.concatenate([_logits(7, before), logits, _logits(8, after)])
        return [sampler.sample(batch, [i] * count).tokens.tolist()[before] for i in range(40)]

    alone = draws(0, 0)
    assert draws(3, 2) == alone
    assert len(set(alone)) > 3


def test_penalties_follow_moving_rows() -> None:
    logits = mx.zeros((1, VOCABULARY)) + mx.arange(VOCABULARY) * 0.01
    top, second = VOCABULARY - 1, VOCABULARY - 2
    rows = [
        _row(prompt=(top,), repetition_penalty=2.0),
        _row(prompt=(top,), output=(top,), presence_penalty=1.0),
        _row(prompt=(top,), frequency_penalty=0.004),
        _row(prompt=(top,)),
    ]
    sampler = _sampler(*rows)
    batch = mx.broadcast_to(logits, (4, VOCABULARY))
    # Presence and frequency penalties count the output only, repetition the prompt, too.
    assert sampler.sample(batch, [0] * 4).tokens.tolist() == [second, second, top, top]
    sampler.rearrange([3, 2], [_row(prompt=(second,), repetition_penalty=2.0)])
    batch = mx.broadcast_to(logits, (3, VOCABULARY))
    # The frequency row has generated ``top`` once; 0.004 less each time, it loses at the third.
    steps = [sampler.sample(batch, [1] * 3).tokens.tolist() for _ in range(4)]
    assert [row[0] for row in steps] == [top] * 4
    assert [row[1] for row in steps] == [top, top, second, top]
    assert [row[2] for row in steps] == [top, second - 1, second - 2, second - 3]


def test_bias_and_stop_tokens_before_min_tokens() -> None:
    logits = mx.zeros((2, VOCABULARY))
    rows = [
        _row(logit_bias={5: 3.0, 9: 2.0, VOCABULARY + 100: 50.0}),
        _row(logit_bias={5: 3.0, 9: 2.0}, stop_token_ids=(5,), min_tokens=2),
    ]
    sampler = _sampler(*rows)
    assert sampler.sample(logits, [0, 0]).tokens.tolist() == [5, 9]
    assert sampler.sample(logits, [1, 1]).tokens.tolist() == [5, 9]
    assert sampler.sample(logits, [2, 2]).tokens.tolist() == [5, 5]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = _logits(4, rows=3)
    rows = [_row(logprobs=3, logit_bias={7: 100.0}), _row(), _row(logprobs=0)]
    sampled = _sampler(*rows).sample(logits, [0, 0, 0])
    logprobs = sampled.logprobs
    assert logprobs is not None
    assert logprobs.rows == [0, 2]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    chosen = sampled.tokens.tolist()
    assert chosen[0] == 7
    assert logprobs.values.chosen.tolist() == pytest.approx(
        [expected[0, 7], expected[2, chosen[2]]], abs=1e-5
    )
    order = np.argsort(-expected[0])[:3]
    assert logprobs.values.top_ids.tolist()[0] == order.tolist()
    assert logprobs.values.top.tolist()[0] == pytest.approx(expected[0, order].tolist(), abs=1e-5)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    length=st.sampled_from([1, 7, 64, 65, 300, 2000]),
    share=st.floats(0, 1),
    ties=st.booleans(),
)
def test_the_largest_numbers_of_rows(
    seed: int, rows: int, length: int, share: float, ties: bool
) -> None:
    numbers = np.random.default_rng(seed).normal(0, 3, (rows, length)).astype(np.float32)
    if ties:
        numbers = np.round(numbers)
    numbers[0, : length // 2] = -np.inf
    k = 1 + int(share * (length - 1))
    places, values = map(np.array, largest(mx.array(numbers), k))
    assert values.tolist() == (-np.sort(-numbers, axis=1)[:, :k]).tolist()
    assert np.take_along_axis(numbers, places.astype(np.int64), 1).tolist() == values.tolist()
    assert all(len(set(row)) == k for row in places.tolist())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 5, 17, 1000, 5000]),
    scale=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    ruled_out=st.booleans(),
    options=st.lists(
        st.tuples(
            st.sampled_from([1e-5, 0.2, 1.0, 1e30]),
            st.sampled_from([0, 1, 20, 10**9]),
            st.sampled_from([0.0, 0.5, 0.95, 1.0]),
            st.sampled_from([0.0, 0.05, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_the_cpu_draws_the_tokens_that_other_devices_draw(
    seed: int,
    vocabulary: int,
    scale: float,
    ruled_out: bool,
    options: list[tuple[float, int, float, float]],
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, scale, (len(options), vocabulary)).astype(np.float32)
    if ruled_out:
        logits[rng.random(logits.shape) < 0.5] = -np.inf
        logits[:, rng.integers(vocabulary)] = 0.0
    params = [
        SamplingParams(1, row, temperature=heat, top_k=k, top_p=p, min_p=m)
        for row, (heat, k, p, m) in enumerate(options)
    ]
    numbers = mx.array(logits)
    call = numbers, numbers, [seed] * len(options), False
    here = np.array(TokenChoice(params).by_operations(*call))
    there = np.array(TokenChoice(params, SamplingMode(lazy=True)).by_operations(*call))
    assert np.isfinite(np.take_along_axis(logits, here[:, None], axis=1)).all()
    # Rounding decides between two tokens once in thousands of draws.
    assert (here != there).sum() <= 1


@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 7, 1000]),
    scale=st.sampled_from([0.0, 3.0, 1000.0]),
)
def test_the_cpu_adds_up_the_probabilities_that_other_devices_do(
    seed: int, vocabulary: int, scale: float
) -> None:
    """Also if tokens are ruled out; a row that is not finite gives no finite total."""
    logits = np.random.default_rng(seed).normal(0, scale, (5, vocabulary)).astype(np.float32)
    logits[0, 1:] = -np.inf
    logits[1] = -np.inf
    logits[2, 0] = np.nan
    logits[3, 0] = np.inf
    array, tokens, k = mx.array(logits), mx.zeros(5, mx.int32), min(5, vocabulary)
    here, there = (call(array, tokens, k) for call in (top_logprobs, lazy_top_logprobs))
    for own, other in zip(here, there, strict=True):
        found, expected = np.array(own)[[0, 4]], np.array(other)[[0, 4]]
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not np.isfinite(np.array(here.chosen)[1:4]).any()
