"""The choice of drafts maximizes the expected tokens per second, and never drafts at a loss."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.page import step_size
from chairlift.scheduler.cost import Work
from chairlift.scheduler.drafts import (
    MAX_PERIOD,
    MIN_GAIN,
    PLAIN_TRUSTED,
    TRUSTED,
    Draft,
    DraftChooser,
)
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_times import KNOWN, REMEMBERED, StepTimes

ROOM = 1000
# The seconds of a step, by its rows and its draft tokens.
Seconds = Callable[[int, int], float]


def _sequence(number: int, max_tokens: int = 10**6) -> Sequence:
    return Sequence(str(number), [1, 2, 3], max_tokens, prompt_tokens=3)


def _draft(chance: float, length: int = 8) -> Draft:
    return Draft(list(range(10, 10 + length)), [chance ** (i + 1) for i in range(length)])


def _linear(row: float, draft: float, drafting: float, step: float) -> Seconds:
    """A row, a draft token, any draft, and the step itself take these seconds."""
    return lambda rows, drafts: step + row * rows + (drafting + draft * drafts if drafts else 0.0)


def _learned(seconds: Seconds, rows: int, uniform: bool = False) -> DraftChooser:
    """Has seen steps of so many rows, with up to eight draft tokens for each."""
    chooser = DraftChooser(uniform)
    for _ in range(KNOWN + 1):
        for drafts in range(8 * rows + 1):
            chooser.learn(Work(rows, 100 * rows, drafts=drafts), seconds(rows, drafts))
    return chooser


class _Run:
    """Serves rows whose drafts have the same chance in every step, and measures each step."""

    def __init__(
        self,
        seconds: Seconds,
        rows: int,
        chance: float,
        uniform: bool = False,
        context_seconds: float = 0.0,
    ) -> None:
        self.chooser = DraftChooser(uniform)
        self._seconds, self._draft = seconds, _draft(chance)
        # The expected tokens that are kept of a draft, by its length.
        self._gains = [0.0, *accumulate(self._draft.chances)]
        self._context_seconds = context_seconds
        self._context = 500.0 * rows
        self._random = random.Random(rows)
        self.sequences = [_sequence(i) for i in range(rows)]
        self._seen: set[int] = set()
        self.counts: list[int] = []

    def rate(self, lengths: list[int]) -> float:
        """The expected tokens per second of a step with drafts of these lengths."""
        return self._kept(lengths) / self._taken(sum(lengths))

    def _kept(self, lengths: list[int]) -> float:
        return len(self.sequences) + sum(map(self._gains.__getitem__, lengths))

    def _taken(self, drafts: int) -> float:
        seconds = self._seconds(len(self.sequences), drafts)
        return seconds + self._context_seconds * self._context

    def step(self) -> float:
        """Runs a step, and returns its rate."""
        drafts = dict.fromkeys(self.sequences, self._draft)
        chosen = self.chooser.choose(drafts, self.sequences, 8 * len(self.sequences))
        rows = len(self.sequences)
        self.chooser.count_step(rows, chosen)
        lengths = [len(chosen.get(s, [])) for s in self.sequences]
        count = sum(lengths)
        first = count and step_size(rows + count) not in self._seen
        self._seen.add(step_size(rows + count))
        # Something is compiled in the first step of each size.
        taken = self._taken(count) * (20 if first else 1)
        if self._context_seconds:
            taken *= self._random.uniform(0.97, 1.03)
        self.chooser.learn(Work(rows, int(self._context), drafts=count), taken)
        self.counts.append(count)
        kept = self._kept(lengths)
        rate = kept / self._taken(count)
        self._context += kept
        return rate

    def best(self) -> float:
        """The rate of the best drafts of one length, none included."""
        return max(self.rate([n] * len(self.sequences)) for n in range(9))


@pytest.mark.slow
@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12),
    st.integers(0, 12),
    st.floats(1e-5, 1e-2),
)
@settings(max_examples=30)
def test_no_other_choice_is_expected_to_be_faster(
    chances: list[float], others: int, draft_seconds: float
) -> None:
    """But for what lies within a size of a step, whose times count as one."""
    seconds = _linear(1e-4, draft_seconds, 1e-3, 0.01)
    rows = [_sequence(i) for i in range(len(chances) + others)]
    drafts = {s: _draft(chance) for s, chance in zip(rows, chances, strict=False)}
    chosen = _learned(seconds, len(rows)).choose(drafts, rows, ROOM)

    def rate(lengths: dict[Sequence, int]) -> float:
        gain = sum(sum(drafts[s].chances[:n]) for s, n in lengths.items())
        return (len(rows) + gain) / seconds(len(rows), sum(lengths.values()))

    lengths = {s: len(tokens) for s, tokens in chosen.items()}
    best = rate(lengths)
    assert all(tokens == drafts[s].tokens[: len(tokens)] for s, tokens in chosen.items())
    assert not chosen or best >= 0.97 * MIN_GAIN * rate({})
    for s in drafts:
        for length in range(9):
            bound = best if chosen else MIN_GAIN * rate({})
            assert rate({**lengths, s: length}) <= 1.1 * bound


def test_good_drafts_of_one_row_are_taken_and_bad_ones_are_not() -> None:
    chooser = _learned(_linear(row=1e-4, draft=1e-4, drafting=0, step=0.02), 1)
    row = _sequence(0)
    for chance, few, many in ((0.9, 8, 8), (0.5, 2, 8), (0.02, 0, 1)):
        chosen = chooser.choose({row: _draft(chance)}, [row], ROOM)
        assert few <= len(chosen.get(row, [])) <= many, chance


def test_a_full_batch_takes_no_drafts() -> None:
    """Where a draft's token costs as much as a row's, only tokens that are nearly certain pay."""
    chooser = _learned(_linear(row=1e-3, draft=1e-3, drafting=0, step=0.001), 200)
    rows = [_sequence(i) for i in range(200)]
    drafts = {s: _draft(0.8) for s in rows}
    assert not chooser.choose(drafts, rows, 10**4)


def test_nothing_is_drafted_before_steps_without_were_measured() -> None:
    row = _sequence(0)
    chooser = DraftChooser(False)
    for _ in range(KNOWN):
        assert not chooser.choose({row: _draft(0.9)}, [row], ROOM)
        chooser.learn(Work(1, 100, tokens=512), 0.5)
        assert not chooser.choose({row: _draft(0.9)}, [row], ROOM)
        chooser.learn(Work(1, 100), 0.01)
    assert chooser.choose({row: _draft(0.9)}, [row], ROOM)


@given(st.integers(1, 12), st.integers(0, 20), st.booleans())
def test_drafts_fit_the_sequence_and_the_step(left: int, room: int, known: bool) -> None:
    seconds = _linear(1e-4, 1e-5, 0, 0.02)
    rows = [_sequence(i, max_tokens=left) for i in range(3)]
    chooser = _learned(seconds, 3) if known else DraftChooser(False)
    for _ in range(KNOWN):
        chooser.learn(Work(3, 300), seconds(3, 0))
    chosen = chooser.choose({s: _draft(0.95) for s in rows}, rows, room)
    assert sum(map(len, chosen.values())) <= room
    # A step gives one token more than it keeps of a draft.
    assert all(len(tokens) + 1 <= left for tokens in chosen.values())


@pytest.mark.slow
@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 9))
def test_recurrent_rows_get_drafts_of_one_length(lengths: list[int], left: int) -> None:
    chooser = _learned(_linear(1e-4, 1e-5, 0, 0.02), len(lengths), uniform=True)
    rows = [_sequence(i, max_tokens=left) for i in range(len(lengths))]
    pairs = zip(rows, lengths, strict=True)
    drafts = {s: _draft(0.95, length) for s, length in pairs if length}
    chosen = chooser.choose(drafts, rows, ROOM)
    if chosen:
        assert set(chosen) == set(rows)
        [length] = {len(tokens) for tokens in chosen.values()}
        assert 1 <= length < left
        for s, tokens in chosen.items():
            own = drafts[s].tokens[:length] if s in drafts else []
            assert tokens[: len(own)] == own


def test_drafts_that_once_took_long_are_tried_again() -> None:
    """They are chosen soon after they have become fast."""
    slow = _linear(row=1e-4, draft=0.05, drafting=0.05, step=0.02)
    fast = _linear(row=1e-4, draft=1e-3, drafting=0, step=0.02)
    run = _Run(lambda rows, drafts: slow(rows, drafts), 1, 0.9)
    for _ in range(4 * TRUSTED):
        run.step()
    assert sum(map(bool, run.counts)) < 40
    run._seconds = fast
    for _ in range(4 * TRUSTED):
        run.step()
    assert statistics.mean(map(run.rate, ([n] for n in run.counts[-50:]))) > 0.9 * run.best()


def test_steps_without_drafts_are_measured_again() -> None:
    """Drafts end soon after steps without them have become fast, e.g. on a machine less busy."""
    slow = _linear(row=1e-4, draft=1e-3, drafting=0, step=0.02)
    fast = _linear(row=1e-4, draft=1e-3, drafting=0.02, step=0.001)
    run = _Run(slow, 4, 0.9)
    for _ in range(PLAIN_TRUSTED):
        run.step()
    assert all(run.counts[-50:])
    run._seconds = fast
    for _ in range(2 * PLAIN_TRUSTED):
        run.step()
    assert not any(run.counts[-50:])


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
def test_the_choice_settles_although_first_steps_took_long(
    rows: int, step: float, row: float, drafting: float, token: float, uniform: bool
) -> None:
    """After some steps it is nearly as fast as the best constant length, none included."""
    run = _Run(_linear(row, token, drafting, step), rows, 0.8, uniform)
    rates = [run.step() for _ in range(200)]
    assert statistics.mean(rates[-60:]) > 0.85 * run.best()


@pytest.mark.slow
@given(
    rows=st.integers(1, 256),
    chance=st.floats(0.3, 0.95),
    host=st.floats(1e-3, 1e-2),
    drafting=st.floats(0, 1e-2),
    weights=st.floats(1e-3, 1e-2),
    tile=st.sampled_from([1, 16, 64, 128]),
    token=st.floats(1e-6, 1e-4),
)
@settings(max_examples=20)
# Qwen3-8B's shape on an H200.
@example(rows=32, chance=0.8, host=7e-3, drafting=3e-3, weights=6e-3, tile=128, token=3e-5)
@example(rows=256, chance=0.8, host=7e-3, drafting=1.5e-2, weights=6e-3, tile=128, token=3e-5)
def test_the_choice_settles_where_times_are_stairs(
    rows: int, chance: float, host: float, drafting: float, weights: float, tile: int, token: float
) -> None:
    """A device computes whole tiles, and no step is faster than the host launches it."""

    def seconds(rows: int, drafts: int) -> float:
        size = step_size(rows + drafts)
        computed = weights + token * tile * -(-size // tile)
        if not drafts:
            return max(host, computed)
        return max(host, computed) + drafting

    run = _Run(seconds, rows, chance)
    rates = [run.step() for _ in range(400)]
    assert statistics.mean(rates[-100:]) > 0.9 * run.best()
    plain = run.rate([0] * rows)
    assert statistics.mean(rates[-100:]) > 0.97 * plain


@pytest.mark.slow
@given(
    rows=st.integers(1, 128),
    host=st.floats(1e-3, 1e-2),
    drafting=st.floats(1e-3, 5e-3),
    token=st.floats(1e-5, 5e-5),
    context=st.floats(1e-8, 2e-7),
)
@settings(max_examples=20)
# Qwen3-8B's shape on an H100.
@example(rows=32, host=5e-3, drafting=3e-3, token=3e-5, context=5e-8)
@example(rows=128, host=5e-3, drafting=3e-3, token=3e-5, context=2e-7)
def test_the_choice_is_right_while_contexts_grow(
    rows: int, host: float, drafting: float, token: float, context: float
) -> None:
    """Sizes that were measured earlier, with shorter contexts, are not taken for faster ones."""

    def seconds(rows: int, drafts: int) -> float:
        computed = max(6e-3, token * step_size(rows + drafts))
        return max(host, computed) + (drafting if drafts else 0.0)

    run = _Run(seconds, rows, 0.8, context_seconds=context)
    shares = []
    for _ in range(300):
        best = run.best()
        shares.append(run.step() / best)
    assert statistics.mean(shares[-200:]) > 0.96


@pytest.mark.parametrize("uniform", [False, True])
def test_without_proposals_nothing_is_drafted(uniform: bool) -> None:
    chooser = _learned(_linear(1e-4, 1e-5, 0, 0.02), 1, uniform)
    assert chooser.choose({}, [_sequence(0)], ROOM) == {}


@pytest.mark.slow
def test_drafts_in_vain_are_tried_ever_more_rarely() -> None:
    """Where a full batch computes each draft at nearly its worth, a trial costs a few steps."""
    run = _Run(_linear(row=1e-4, draft=1e-4, drafting=1e-3, step=0.001), 20, 0.8)
    for _ in range(3 * MAX_PERIOD):
        run.step()
    steps = [step for step, count in enumerate(run.counts) if count]
    trials = [later for earlier, later in pairwise([-2 * KNOWN, *steps]) if later > earlier + KNOWN]
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert len(steps) < 100
    assert max(gaps) >= MAX_PERIOD / 2
    assert gaps == sorted(gaps) or max(gaps) > 8 * gaps[0]


def test_times_are_medians_of_the_last_steps() -> None:
    times = StepTimes()
    rng = random.Random(0)
    assert times.plain(5) is None
    for _ in range(3 * REMEMBERED):
        times.learn(Work(5), 9.0 if rng.random() < 0.2 else 2.0)
        times.learn(Work(5, tokens=7), 30.0)
        times.learn(Work(5, drafts=3), 3.0)
    assert times.plain(5) == 2.0
    assert times.plain(6) is None
    assert times.drafted() == {8: (8, 3.0)}
    assert times.drafted_steps == REMEMBERED
    times.forget(8, drafted=True)
    assert times.drafted() == {}
    assert times.plain(5) == 2.0
    times.forget(5, drafted=False)
    assert times.plain(5) is None
