"""Drafts change neither a row's tokens nor their distribution."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.page import step_size
from chairlift.engine.core.step import accepted
from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.choice import SamplingMode
from chairlift.engine.sampling.sampler import Sampler, SamplerRow

VOCABULARY = 8
DRAWS = 100_000
DRAWS_ON_HOST = 10_000
# Quantiles of chi-square's distribution: of 63 and fewer degrees of freedom, exceeded once in 10^6.
CHI_SQUARE = 127.0

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 1.1},
    "logit_bias": {"logit_bias": {2: 2.0, 5: -1.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (1, 4)},
}


def _model(previous: np.ndarray[Any, Any]) -> mx.array:
    """The logits after each of ``previous``: ``[tokens, VOCABULARY]``."""
    table = np.random.default_rng(3).normal(0, 1.2, (VOCABULARY, VOCABULARY))
    return mx.array(table[previous].astype(np.float32))


def _sampler(params: SamplingParams, rows: int, lazy: bool) -> Sampler:
    sampler = Sampler(VOCABULARY, mode=SamplingMode(lazy=lazy))
    own = [
        SamplerRow(msgspec.structs.replace(params, seed=seed), [0, 3], []) for seed in range(rows)
    ]
    sampler.rearrange([], own)
    return sampler


def _two_tokens(
    params: SamplingParams, drafts: list[list[int]], lazy: bool = False
) -> list[list[int]]:
    """The first two output tokens of rows that bring these drafts, of one token at most."""
    rows = len(drafts)
    sampler = _sampler(params, rows, lazy)
    fed = [[0, *draft] for draft in drafts]
    logits = _model(np.array([token for row in fed for token in row]))
    sampled = sampler.sample_drafts(logits, [0] * rows, drafts)
    outputs = accepted(drafts, np.array(sampled.outcomes))
    sampler.count(outputs)
    short = [row for row, output in enumerate(outputs) if len(output) == 1]
    if short:
        sampler.rearrange(short, [])
        logits = _model(np.array([outputs[row][0] for row in short]))
        more: Any = sampler.sample(logits, [1] * len(short)).outcomes.tolist()
        for row, token in zip(short, more, strict=True):
            outputs[row].append(token)
    return outputs


def _processed(logits: np.ndarray[Any, Any], output: list[int], p: SamplingParams) -> Any:
    """The distribution of the next token in float64, as the API documents it."""
    x = logits.astype(np.float64)
    for token, value in p.logit_bias.items():
        x[token] += value
    if len(output) < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
    counts = np.bincount(output, minlength=VOCABULARY)
    seen = counts > 0
    seen_or_prompt = seen.copy()
    seen_or_prompt[[0, 3]] = True
    repeated = np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
    x = np.where(seen_or_prompt, repeated, x)
    x = x - p.presence_penalty * seen - p.frequency_penalty * counts
    x = x / p.temperature
    weights = np.exp(x - x.max())
    order = np.argsort(-weights)
    if p.top_k:
        weights[order[p.top_k :]] = 0
    if p.top_p < 1:
        total = np.cumsum(weights[order]) / weights.sum()
        weights[order[np.searchsorted(total, p.top_p) + 1 :]] = 0
    weights[weights < p.min_p * weights.max()] = 0
    return weights / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_the_distribution_is_the_models_own(option: str) -> None:
    """Chi-square of pairs of tokens, half of them with a draft as likely as the token.

    MLX's operations draw for all rows at once. A CPU's own function, which takes longer because it
    draws row by row, draws the same tokens.
    """
    params = SamplingParams(max_tokens=9, seed=0, **OPTIONS[option])
    random_ = random.Random(option)
    first = _processed(np.array(_model(np.array([0])))[0], [], params)
    proposed = random_.choices(range(VOCABULARY), first, k=DRAWS)
    drafts = [[token] if i % 2 else [] for i, token in enumerate(proposed)]
    outputs = np.array(_two_tokens(params, drafts, lazy=True))
    on_host = np.array(_two_tokens(params, drafts[:DRAWS_ON_HOST]))
    # Rounding decides between two tokens once in thousands of draws.
    assert (on_host != outputs[:DRAWS_ON_HOST]).any(axis=1).sum() <= DRAWS_ON_HOST // 1000
    expected = np.zeros((VOCABULARY, VOCABULARY))
    for token in range(VOCABULARY):
        second = _processed(np.array(_model(np.array([token])))[0], [token], params)
        expected[token] = DRAWS * first[token] * second
    seen = np.zeros_like(expected)
    np.add.at(seen, (outputs[:, 0], outputs[:, 1]), 1)
    possible = expected > 0
    assert not seen[~possible].any()
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < CHI_SQUARE


@given(st.data())
def test_tokens_do_not_depend_on_drafts(data: st.DataObject) -> None:
    options = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4))
    chosen: dict[str, Any] = {"temperature": data.draw(st.sampled_from([0.0, 0.6, 1.0]))}
    for option in options:
        chosen |= OPTIONS[option]
    params = SamplingParams(max_tokens=9, seed=0, **chosen)
    rows = data.draw(st.integers(1, 6))
    tokens = st.integers(0, VOCABULARY - 1)
    drafts = data.draw(st.lists(st.lists(tokens, max_size=1), min_size=rows, max_size=rows))
    assert _two_tokens(params, drafts) == _two_tokens(params, [[] for _ in range(rows)])


@given(st.lists(st.sampled_from([*sorted(OPTIONS), "greedy"]), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_unused_lines_of_logits_change_nothing(names: list[str]) -> None:
    """Steps over pages have logits of recurring sizes."""
    options = [OPTIONS.get(name, {"temperature": 0.0}) for name in names]
    rows = [
        SamplerRow(SamplingParams(9, seed, **option), [0, 3], [2])
        for seed, option in enumerate(options)
    ]
    count = len(rows)
    logits = mx.random.normal((count, VOCABULARY), key=mx.random.key(count))
    unused = mx.full((step_size(count) - count, VOCABULARY), float("nan"))
    results = []
    for size, given_logits in ((int, logits), (step_size, mx.concatenate([logits, unused]))):
        sampler = Sampler(VOCABULARY, mode=SamplingMode(size))
        sampler.rearrange([], rows)
        sampled = sampler.sample(given_logits, [1] * count)
        results.append((sampled.tokens.tolist(), sampled.outcomes.tolist()))
    assert results[0] == results[1]
    assert len(results[0][0]) == count
