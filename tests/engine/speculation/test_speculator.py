"""Proposals are made where they pay, and tried again from time to time where they do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.grammar.constraints import Constraints
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.messages.speculative_config import SpeculativeConfig
from chairlift.engine.speculation.acceptance import Acceptance, Rate
from chairlift.engine.speculation.lookup import MAX_INDEXED
from chairlift.engine.speculation.proposal import PredictionProposer, proposers
from chairlift.engine.speculation.speculator import MAX_PERIOD, PATIENCE, Speculator
from chairlift.scheduler.drafts import Chosen, Drafts
from chairlift.scheduler.sequence import Sequence

TOKENS = 6


def _speculator(waits: bool, tokens: int = TOKENS) -> Speculator:
    request = Submit("0", [1], SamplingParams(9, 0))
    config = SpeculativeConfig()
    return Speculator(
        *(lambda submit: proposers(submit, config), waits, tokens),
        *(Constraints(99, lambda sequence: None), lambda sequence: request),
    )


def _repeating(length: int) -> Sequence:
    return Sequence("0", [3, 4, 5, 6] * length, 1000, prompt_tokens=4)


def _all(drafts: Drafts) -> Chosen:
    return {sequence: draft.tokens for sequence, draft in drafts.items()}


def _none(drafts: Drafts) -> Chosen:
    return {}


def test_what_followed_earlier_is_proposed() -> None:
    chosen = _speculator(True).drafts([sequence := _repeating(3)], _all)
    assert chosen == {sequence: [3, 4, 5, 6, 3, 4]}


def test_chances_follow_the_tokens_that_came() -> None:
    seen: list[float] = []
    for right in (True, False):
        speculator, sequence = _speculator(True), _repeating(5)

        def choose(drafts: Drafts) -> Chosen:
            seen.append(next(iter(drafts.values())).chances[0])
            return {}

        speculator.drafts([sequence], choose)
        for number in range(3):
            sequence.tokens += [3, 4, 5, 6] if right else [10 + number, 4, 5, 6]
            speculator.drafts([sequence], choose)
    first, right_later, wrong_later = seen[0], seen[3], seen[7]
    assert right_later > first > wrong_later


def test_useless_proposals_cost_ever_fewer_steps() -> None:
    speculator, sequence = _speculator(True), _repeating(3)
    asked = 0
    for _ in range(1000):
        if speculator.due(1, False):
            asked += 1
            speculator.drafts([sequence], _none)
    assert PATIENCE < asked < PATIENCE + 10 + 1000 / MAX_PERIOD
    assert speculator.due(1, True), "a step with drafts is always read first"


def test_an_engine_that_runs_ahead_waits_only_for_good_proposals() -> None:
    speculator, sequence = _speculator(False), _repeating(3)
    assert not speculator.due(1, False)
    speculator.probe([sequence], _none)
    assert not speculator.due(1, False)
    speculator.probe([sequence], _all)
    assert speculator.due(1, False)
    speculator.drafts([sequence], _none)
    assert not speculator.due(1, False)


@pytest.mark.parametrize("waits", [True, False])
def test_without_room_for_drafts_no_step_is_read_first(waits: bool) -> None:
    speculator = _speculator(waits, tokens=0)
    for _ in range(3):
        assert not speculator.due(1, False)
        speculator.probe([_repeating(3)], _all)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_chances_are_probabilities(results: list[bool]) -> None:
    acceptance, rate = Acceptance(), Rate()
    for right in results:
        acceptance.observe("a", rate, [1, 2], [1, 2] if right else [3, 2])
        assert 0 < acceptance.chance("a", rate) < 1
        assert 0 < acceptance.chance("another", Rate()) < 1


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 2**32), st.integers(1, 8))
def test_a_prediction_is_followed_and_found_again(
    prediction: list[int], seed: int, count: int
) -> None:
    random_ = random.Random(seed)
    proposer = PredictionProposer(prediction)
    sequence = Sequence("0", [9], 100, prompt_tokens=1)
    for _ in range(30):
        output = sequence.tokens[1:]
        proposal = proposer.propose(sequence, count)
        if output == prediction[: len(output)] and len(output) < len(prediction):
            assert proposal is not None
            assert proposal.tokens == prediction[len(output) : len(output) + count]
        if proposal is not None:
            assert 1 <= len(proposal.tokens) <= count
            start = random_.choice([0, 0, 0, 1])
            kept = proposal.tokens[: random_.randrange(len(proposal.tokens) + 1)]
            sequence.tokens += kept if not start else [random_.randrange(6)]
        else:
            sequence.tokens.append(random_.randrange(6))


class Read(list[int]):
    """Tokens that count how many of them were read."""

    count = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.count += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("kind", ["prediction", "prompt"])
def test_a_long_text_delays_no_step_however_many_choices_have_it(kind: str) -> None:
    """128 choices with a prediction of 40,000 tokens had delayed a step by five seconds."""
    text, choices = Read(range(10, 5 * MAX_INDEXED)), 16
    prompt, prediction = (text, []) if kind == "prompt" else ([1, 2], text)
    request = Submit("0", prompt, SamplingParams(9, 0), choices, prediction=prediction)
    speculator = Speculator(
        *(lambda submit: proposers(submit, SpeculativeConfig()), True, TOKENS),
        *(Constraints(99, lambda sequence: None), lambda sequence: request),
    )
    rows = [Sequence("0", [*prompt, 3], 9, prompt_tokens=len(prompt)) for _ in range(choices)]
    speculator.drafts(rows[:1], _all)
    width = SpeculativeConfig().match_lengths[0]
    assert text.count <= width * MAX_INDEXED + 100
    for _ in range(4):
        speculator.drafts(rows, _all)
    assert text.count <= width * len(text) + 100 * choices


@pytest.mark.parametrize("rows", [1, 40, 256])
def test_useless_proposals_of_many_rows_are_soon_made_rarely(rows: int) -> None:
    speculator = _speculator(True)
    sequences = [_repeating(3) for _ in range(rows)]
    asked = []
    for step in range(1000):
        if speculator.due(rows, False):
            asked.append(step)
            speculator.drafts(sequences, _none)
    assert len(asked) < PATIENCE // rows + 10 + 1000 / max(MAX_PERIOD, rows // 4)
    assert asked[-1] > 900
