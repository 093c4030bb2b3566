"""The choice of drafts maximizes the expected tokens per second, and never drafts at a loss."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift.scheduler.cost import CostModel, Work, kind_of
from chairlift.scheduler.drafts import (
    HALVED_IN,
    MAX_HALVED_IN,
    MIN_GAIN,
    Draft,
    DraftChooser,
)
from chairlift.scheduler.sequence import Sequence

ROOM = 1000


def _sequence(number: int, max_tokens: int = 100) -> Sequence:
    return Sequence(str(number), [1, 2, 3], max_tokens, prompt_tokens=3)


def _cost(row: float, draft: float, drafting: float, step: float) -> CostModel:
    """Has seen steps with these seconds for a row, a draft token, any draft, and the step."""
    cost = CostModel()
    random_ = random.Random(1)
    for number in range(96):
        # Steps of each magnitude; see ``scheduler.cost.Kind``.
        rows, drafts = (
            random_.randrange(1 << number % 8, 2 << number % 8),
            random_.randrange(1, 200),
        )
        cost.learn(Work(rows, 100 * rows), step + row * rows)
        seconds = step + row * rows + draft * drafts + drafting
        cost.learn(Work(rows, 100 * rows, drafts=drafts), seconds)
    return cost


def _draft(chance: float, length: int = 8) -> Draft:
    return Draft(list(range(10, 10 + length)), [chance ** (i + 1) for i in range(length)])


@pytest.mark.slow
@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12),
    st.integers(0, 30),
    st.floats(1e-5, 1e-2),
)
def test_no_other_choice_is_expected_to_be_faster(
    chances: list[float], others: int, draft_seconds: float
) -> None:
    cost = _cost(1e-4, draft_seconds, 1e-3, 0.01)
    rows = [_sequence(i) for i in range(len(chances) + others)]
    drafts = {s: _draft(chance) for s, chance in zip(rows, chances, strict=False)}
    work = Work(len(rows), 100 * len(rows))
    chosen = DraftChooser(uniform=False).choose(drafts, rows, work, cost, ROOM)

    def rate(lengths: dict[Sequence, int]) -> float:
        gain = sum(sum(drafts[s].chances[:n]) for s, n in lengths.items())
        return (len(rows) + gain) / cost.seconds(work._replace(drafts=sum(lengths.values())))

    lengths = {s: len(tokens) for s, tokens in chosen.items()}
    best = rate(lengths)
    assert all(tokens == drafts[s].tokens[: len(tokens)] for s, tokens in chosen.items())
    assert not chosen or best >= MIN_GAIN * rate({}) * (1 - 1e-9)
    for s in drafts:
        for length in (lengths.get(s, 0) - 1, lengths.get(s, 0) + 1):
            if 0 <= length <= 8:
                bound = best if chosen else MIN_GAIN * rate({})
                assert rate({**lengths, s: length}) <= bound * (1 + 1e-9)


def test_good_drafts_of_one_row_are_taken_and_bad_ones_are_not() -> None:
    cost = _cost(row=1e-4, draft=1e-4, drafting=0, step=0.02)
    row = _sequence(0)
    for chance, few, many in ((0.9, 8, 8), (0.5, 2, 8), (0.02, 0, 1)):
        chosen = DraftChooser(False).choose({row: _draft(chance)}, [row], Work(1, 100), cost, ROOM)
        assert few <= len(chosen.get(row, [])) <= many, chance


def test_a_full_batch_takes_no_drafts() -> None:
    """Where a draft's token costs as much as a row's, only tokens that are nearly certain pay."""
    cost = _cost(row=1e-3, draft=1e-3, drafting=0, step=0.001)
    rows = [_sequence(i) for i in range(200)]
    drafts = {s: _draft(0.8) for s in rows}
    assert not DraftChooser(False).choose(drafts, rows, Work(200, 20_000), cost, ROOM)


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    row = _sequence(0)
    chooser = DraftChooser(False)
    assert not chooser.choose({row: _draft(0.9)}, [row], Work(1, 100), CostModel(), ROOM)


@given(st.integers(1, 12), st.integers(0, 20))
def test_drafts_fit_the_sequence_and_the_step(left: int, room: int) -> None:
    cost = _cost(1e-4, 1e-5, 0, 0.02)
    rows = [_sequence(i, max_tokens=left) for i in range(3)]
    drafts = {s: _draft(0.95) for s in rows}
    chosen = DraftChooser(False).choose(drafts, rows, Work(3, 300), cost, room)
    assert sum(map(len, chosen.values())) <= room
    # A step gives one token more than it keeps of a draft.
    assert all(len(tokens) + 1 <= left for tokens in chosen.values())


@pytest.mark.slow
@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 9))
def test_recurrent_rows_get_drafts_of_one_length(lengths: list[int], left: int) -> None:
    cost = _cost(1e-4, 1e-5, 0, 0.02)
    rows = [_sequence(i, max_tokens=left) for i in range(len(lengths))]
    pairs = zip(rows, lengths, strict=True)
    drafts = {s: _draft(0.95, length) for s, length in pairs if length}
    chosen = DraftChooser(True).choose(drafts, rows, Work(len(rows), 300), cost, ROOM)
    if chosen:
        assert set(chosen) == set(rows)
        [length] = {len(tokens) for tokens in chosen.values()}
        assert 1 <= length < left
        for s, tokens in chosen.items():
            own = drafts[s].tokens[:length] if s in drafts else []
            assert tokens[: len(own)] == own


def test_drafts_that_once_took_long_are_tried_again() -> None:
    cost = _cost(row=1e-4, draft=0.05, drafting=0.05, step=0.02)
    row = _sequence(0)
    chooser = DraftChooser(False)
    choices = []
    for _ in range(20 * HALVED_IN):
        chosen = chooser.choose({row: _draft(0.9)}, [row], Work(1, 100), cost, ROOM)
        choices.append(len(chosen.get(row, [])))
        chooser.count_step(chosen)
    assert not any(choices[:HALVED_IN])
    assert 0 < sum(map(bool, choices)) < 11
    assert max(choices) <= 4


@pytest.mark.slow
@given(
    rows=st.integers(1, 64),
    step=st.floats(1e-3, 2e-2),
    row=st.floats(1e-5, 1e-3),
    drafting=st.floats(0, 2e-2),
    token=st.floats(1e-5, 5e-3),
    uniform=st.booleans(),
)
@settings(max_examples=20)
def test_the_choice_settles_although_the_first_draft_took_long(
    rows: int, step: float, row: float, drafting: float, token: float, uniform: bool
) -> None:
    """After some steps it is nearly as fast as the best constant length, none included.

    Something is compiled in the first step of each kind.
    """
    chance, sequences = 0.8, [_sequence(i) for i in range(rows)]
    cost, chooser, work = CostModel(), DraftChooser(uniform), Work(rows, 100 * rows)

    def seconds(tokens: int) -> float:
        return step + row * rows + (drafting + token * tokens if tokens else 0.0)

    def rate(lengths: list[int]) -> float:
        gain = sum(sum(chance**i for i in range(1, n + 1)) for n in lengths)
        return (rows + gain) / seconds(sum(lengths))

    rates, seen = [], set()
    for _ in range(120):
        drafts = {s: _draft(chance) for s in sequences}
        chosen = chooser.choose(drafts, sequences, work, cost, ROOM)
        chooser.count_step(chosen)
        lengths = [len(chosen.get(s, [])) for s in sequences]
        done = work._replace(drafts=sum(lengths))
        first = chosen and kind_of(done) not in seen
        seen.add(kind_of(done))
        cost.learn(done, seconds(sum(lengths)) * (20 if first else 1))
        rates.append(rate(lengths))
    best = max(rate([n] * rows) for n in range(9))
    assert statistics.mean(rates[-40:]) > 0.85 * best


@pytest.mark.slow
@given(
    most=st.integers(1, 256),
    host=st.floats(2e-3, 1e-2),
    row=st.floats(1e-6, 1e-4),
    prompt=st.floats(1e-5, 4e-5),
    drafting=st.floats(0, 2e-4),
    token=st.floats(1e-6, 1e-4),
)
@settings(max_examples=30)
@example(most=256, host=8e-3, row=2e-5, prompt=3e-5, drafting=1e-4, token=2e-5)
def test_rows_are_compared_with_steps_without_drafts(
    most: int, host: float, row: float, prompt: float, drafting: float, token: float
) -> None:
    """Rows join while prompts are computed, and have drafts from the first step on.

    No step is faster than the host launches it, and each row with a draft takes longer. So steps of
    few rows, and those with prompts, say little about many rows without prompts.
    """
    chance, cost, chooser = 0.8, CostModel(), DraftChooser(False)
    sequences = [_sequence(i) for i in range(most)]
    rates = []
    for number in range(200):
        rows = sequences[: min(most, 1 + number * 8)]
        tokens = 1024 if len(rows) < most else 0
        work = Work(len(rows), 600 * len(rows), tokens, 600 * tokens, 2 if tokens else 0)
        drafts = {s: _draft(chance) for s in rows}
        chosen = chooser.choose(drafts, rows, work, cost, ROOM)
        chooser.count_step(chosen)
        count = sum(map(len, chosen.values()))
        seconds = max(host, row * len(rows) + prompt * tokens + token * count)
        seconds += drafting * len(chosen)
        cost.learn(work._replace(drafts=count), seconds)
        gain = sum(sum(chance ** (i + 1) for i in range(len(c))) for c in chosen.values())
        rates.append((len(rows) + gain) / seconds)
    plain = most / max(host, row * most)
    assert statistics.mean(rates[-40:]) > 0.97 * plain


@pytest.mark.parametrize("uniform", [False, True])
def test_without_proposals_nothing_is_drafted(uniform: bool) -> None:
    cost = _cost(1e-4, 1e-5, 0, 0.02)
    assert DraftChooser(uniform).choose({}, [_sequence(0)], Work(1, 100), cost, ROOM) == {}


@pytest.mark.slow
def test_drafts_in_vain_are_tried_ever_more_rarely() -> None:
    """Where a full batch computes each draft at nearly its worth, a trial costs a few steps."""
    cost = _cost(row=1e-4, draft=1e-4, drafting=1e-3, step=0.001)
    rows = [_sequence(i, max_tokens=10**6) for i in range(200)]
    chooser = DraftChooser(False)
    trials = []
    for step in range(5 * MAX_HALVED_IN):
        # The choice of most steps, in which nothing is learned, would be the same.
        if step % 64 == 0:
            drafts = {s: _draft(0.9, 1) for s in rows}
            chosen = chooser.choose(drafts, rows, Work(200, 20_000), cost, ROOM)
        chooser.count_step(chosen)
        if chosen:
            trials.append(step)
            chosen = {}
    gaps = [later - earlier for earlier, later in pairwise([0, *trials])]
    assert 3 < len(trials) < 40
    assert max(gaps) > 8 * gaps[0]
    assert gaps[-1] <= MAX_HALVED_IN
