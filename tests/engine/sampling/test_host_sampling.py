"""Sampling on a CPU chooses what MLX's operations choose."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.choice import SamplingMode, host_samples
from chairlift.engine.sampling.logprobs import lazy_top_logprobs, top_logprobs
from chairlift.engine.sampling.sampler import Sampler, SamplerRow
from chairlift.scheduler.drafts import FILLER

pytestmark = pytest.mark.skipif(not host_samples(), reason="this device samples otherwise")
VOCABULARY = 100

_params = st.builds(
    SamplingParams,
    st.just(50),
    st.integers(0, 2**32),
    min_tokens=st.sampled_from([0, 2]),
    temperature=st.sampled_from([0.0, 1e-4, 0.7, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY + 5), st.floats(-5, 5), max_size=3),
    logprobs=st.sampled_from([None, 0, 1, 5]),
    stop_token_ids=st.just((3, 4)),
)
_tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
_rows = st.lists(st.builds(SamplerRow, _params, _tokens, _tokens), min_size=1, max_size=6)


def _samplers() -> tuple[Sampler, Sampler]:
    return Sampler(VOCABULARY), Sampler(VOCABULARY, mode=SamplingMode(lazy=True))


@settings(max_examples=150, deadline=None)
@given(
    first=_rows,
    later=st.lists(_rows, max_size=2),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
    data=st.data(),
)
def test_rows_that_join_and_leave(
    first: list[SamplerRow],
    later: list[list[SamplerRow]],
    seed: int,
    masked: bool,
    data: st.DataObject,
) -> None:
    """Tokens and log-probabilities, over some steps; a draw may differ where rounding decides."""
    rng = np.random.default_rng(seed)
    samplers, rows = _samplers(), 0
    differing = 0
    for joined in [first, *later]:
        kept = data.draw(st.permutations(range(rows)))[: rows // 2 + 1]
        for sampler in samplers:
            sampler.rearrange(kept, joined)
        rows = len(kept) + len(joined)
        for step in range(3):
            logits = mx.array(rng.normal(0, 3, (rows, VOCABULARY)).astype(np.float32))
            masks = None
            if masked:
                bits = rng.integers(-(2**31), 2**31, (rows, -(-VOCABULARY // 32)))
                masks = bits.astype(np.int32)
            here, there = (one.sample(logits, [step] * rows, masks) for one in samplers)
            differing += int((here.outcomes != there.outcomes).sum().item())
            assert (here.logprobs is None) == (there.logprobs is None)
            if here.logprobs is not None and there.logprobs is not None and not differing:
                assert here.logprobs.rows == there.logprobs.rows
                for one, other in zip(here.logprobs.values, there.logprobs.values, strict=True):
                    assert np.allclose(np.array(one), np.array(other), atol=1e-5)
            if differing:
                # From here on, the rows may have different outputs.
                assert differing <= 1
                return


@settings(max_examples=100, deadline=None)
@given(rows=_rows, seed=st.integers(0, 10**6), data=st.data())
def test_drafts(rows: list[SamplerRow], seed: int, data: st.DataObject) -> None:
    drafts = [data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3)) for _ in rows]
    lines = len(rows) + sum(map(len, drafts))
    rng = np.random.default_rng(seed)
    samplers = _samplers()
    for sampler in samplers:
        sampler.rearrange([], rows)
    for step in (0, 5):
        logits = mx.array(rng.normal(0, 3, (lines, VOCABULARY)).astype(np.float32))
        generated = [step] * len(rows)
        here, there = (one.sample_drafts(logits, generated, drafts) for one in samplers)
        assert (here.outcomes != there.outcomes).sum().item() <= 1
        for sampler in samplers:
            sampler.count([[max(token, 0) for token in draft] + [1] for draft in drafts])


@settings(max_examples=60, deadline=None)
@given(rows=_rows, seed=st.integers(0, 10**6), data=st.data())
def test_each_place_of_a_draft_is_sampled_as_without_other_rows(
    rows: list[SamplerRow], seed: int, data: st.DataObject
) -> None:
    """With the tokens before it as the row's output, and with its own mask."""
    tokens = st.integers(0, VOCABULARY - 1)
    drafts = [data.draw(st.lists(tokens | st.just(FILLER), max_size=3)) for _ in rows]
    rng = np.random.default_rng(seed)
    places = [(row, i) for row, draft in enumerate(drafts) for i in range(len(draft) + 1)]
    logits = rng.normal(0, 3, (len(places), VOCABULARY)).astype(np.float32)
    bits = rng.integers(-(2**31), 2**31, (len(places), -(-VOCABULARY // 32))).astype(np.int32)
    sampler = Sampler(VOCABULARY)
    sampler.rearrange([], rows)
    generated = [len(row.output) for row in rows]
    found = sampler.sample_drafts(mx.array(logits), generated, drafts, bits)
    for line, (row, i) in enumerate(places):
        before = drafts[row][:i]
        if FILLER in before:
            continue  # never kept
        output = [*rows[row].output, *before]
        alone = Sampler(VOCABULARY)
        alone.rearrange([], [SamplerRow(rows[row].params, rows[row].prompt, output)])
        one = slice(line, line + 1)
        expected = alone.sample(mx.array(logits[one]), [len(output)], bits[one])
        assert found.outcomes[line].item() == expected.outcomes.item()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 30, 64, 200, 5000]),
    levels=st.sampled_from([1, 3, 40]),
    k=st.integers(1, 20),
)
def test_of_equally_likely_tokens_the_first_are_reported(
    seed: int, vocabulary: int, levels: int, k: int
) -> None:
    """Whatever other rows request, and on both ways; logits of 16 bits often tie."""
    k = min(k, vocabulary)
    logits = np.random.default_rng(seed).integers(0, levels, (3, vocabulary)).astype(np.float32)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    for call in (top_logprobs, lazy_top_logprobs):
        found = call(mx.array(logits), mx.zeros(3, mx.int32), k)
        assert np.array_equal(np.array(found.top_ids), expected)


def test_logits_that_are_not_finite_fail_their_row_only() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (6, VOCABULARY)).astype(np.float32)
    logits[0, 5] = np.nan
    logits[1, 5] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf
    for params in (
        SamplingParams(5, 0, temperature=0.0),
        SamplingParams(5, 0, top_k=5, top_p=0.5, min_p=0.1, logprobs=5),
        SamplingParams(5, 0, presence_penalty=1.0, logprobs=0),
    ):
        outcomes = []
        for sampler in _samplers():
            sampler.rearrange([], [SamplerRow(params, [1], [2]) for _ in logits])
            sampled = sampler.sample(mx.array(logits), [0] * len(logits))
            mx.eval(sampled.arrays)
            outcomes.append(sampled.outcomes.tolist())
        assert outcomes[0] == outcomes[1]
        assert [outcome < 0 for outcome in outcomes[0]] == [True] * 3 + [False] * 3
