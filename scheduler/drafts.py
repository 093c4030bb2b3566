"""Chooses how many proposed tokens of each row a step verifies.

A verified token costs time and is kept only with some probability. So the choice maximizes the
expected tokens per second of the step: rows with the best chances first, and none at all if the
step is better without. What a further token costs is learned from earlier steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

from chairlift.scheduler.cost import CostModel, Work
from chairlift.scheduler.sequence import Sequence

# A step must be expected to be better by this much: predictions have errors.
MIN_GAIN = 1.03
# The cost of drafts may have been measured at a bad time. While no step has any, it counts less in
# each step, half of it after this many, until a few tokens are tried again. If even then no step
# with drafts is worth its cost, the next trial comes after twice as many steps, at most so many.
HALVED_IN = 256
MAX_HALVED_IN = 32 * HALVED_IN
# Measurements have outliers. So the cost of drafts counts as nothing until so many steps had some,
# and no row has a draft until so many steps of as many rows had none: a guess from steps of fewer
# rows, or with prompts, may be wrong by a factor of two.
TRIALS = 4
# The tokens of a step that only tries drafts, for each row, in turn: steps of different sizes tell
# the cost of a token from that of having drafts at all.
TRIAL_TOKENS = (0.25, 1.0, 4.0)


class Draft(NamedTuple):
    """Proposed next tokens of a sequence.

    Attributes:
        tokens: at least one.
        chances: for each token, the probability that it and all tokens before it are right.
    """

    tokens: list[int]
    chances: list[float]


Drafts = Mapping[Sequence, Draft]
Chosen = dict[Sequence, list[int]]


class _Steps(NamedTuple):
    """The steps to choose from: one without drafts, and others with more and more of them.

    Attributes:
        work: the work without drafts.
        cost: predicts a step's time.
        discount: the share of a draft's cost that counts.
    """

    work: Work
    cost: CostModel
    discount: float = 1.0

    def best_count(self, expected: Seq[float], counts: Seq[int]) -> int:
        """The number of candidates to take, 0 for none.

        Args:
            expected: tokens that the first candidates are expected to gain, by their number. No
                candidate gains more than the one before.
            counts: the draft tokens of these, a multiple of their number.
        """
        rows, plain = self.work.rows, self.cost.seconds(self.work)
        if not plain:
            return 0
        best, best_rate = 0, MIN_GAIN * rows / plain
        last = 0.0
        drafting, each = (self.discount * seconds for seconds in self.cost.draft_seconds())
        for number, (gain, count) in enumerate(zip(expected, counts, strict=True), 1):
            rate = (rows + gain) / (plain + drafting + each * count)
            if rate < last:
                break  # and from here on it falls
            last = rate
            if rate > best_rate:
                best, best_rate = number, rate
        return best


class DraftChooser:
    """Chooses the drafts of each step.

    Args:
        uniform: all rows of a step need drafts of the same length, because padding would corrupt
            recurrent states. Rows with shorter drafts then get arbitrary tokens.
        size: the number of tokens with which a step of so many is computed; more drafts cost
            nothing up to there.
    """

    def __init__(self, uniform: bool, size: Callable[[int], int] = int) -> None:
        self._uniform = uniform
        self._size = size
        # Steps since the last one with drafts, and how many had some.
        self._plain_steps = self._drafted_steps = 0
        self._halved_in = HALVED_IN
        # Whether the last drafts were chosen at less than their cost.
        self._trying = False

    def count_step(self, drafts: Mapping[Sequence, Seq[int]]) -> None:
        """Counts a planned step with these drafts."""
        if drafts:
            longer = min(2 * self._halved_in, MAX_HALVED_IN)
            self._halved_in = longer if self._trying else HALVED_IN
            self._plain_steps = 0
            self._drafted_steps += 1
        else:
            self._plain_steps += 1

    def choose(
        self, drafts: Drafts, rows: Seq[Sequence], work: Work, cost: CostModel, room: int
    ) -> Chosen:
        """Chooses the drafts of a step.

        Args:
            drafts: what is proposed for some of the rows.
            rows: the sequences that gain a token.
            work: the step's work without drafts.
            cost: predicts a step's time.
            room: maximum tokens of all drafts together.

        Returns:
            The first tokens of some of the drafts.
        """
        own = {s: draft for s in rows if (draft := _cut(s, drafts.get(s)))}
        if not own or (not work.tokens and cost.alike(work) < TRIALS):
            return {}
        choose = self._same_length if self._uniform else self._best
        known = cost.draft_steps >= TRIALS
        if known and (chosen := choose(own, rows, _Steps(work, cost), room)):
            self._trying = False
            return chosen
        self._trying = known
        discount = 0.5 ** (self._plain_steps / self._halved_in) if known else 0.0
        size = math.ceil(len(rows) * TRIAL_TOKENS[self._drafted_steps % len(TRIAL_TOKENS)])
        least = len(rows) if self._uniform else 0
        return choose(own, rows, _Steps(work, cost, discount), min(room, max(size, least)))

    def _best(self, drafts: Drafts, rows: Seq[Sequence], steps: _Steps, room: int) -> Chosen:
        """The tokens with the best chances. Chances never rise, so a draft's first tokens lead."""
        chances = [chance for draft in drafts.values() for chance in draft.chances]
        owners = [sequence for sequence, draft in drafts.items() for _ in draft.chances]
        ranked = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:room]
        expected = list(accumulate(map(chances.__getitem__, ranked)))
        best = steps.best_count(expected, range(1, len(ranked) + 1))
        if best:
            others = steps.work.rows + steps.work.tokens
            best = self._size(others + best) - others
        counts = Counter(map(owners.__getitem__, ranked[:best]))
        return {s: drafts[s].tokens[:count] for s, count in counts.items()}

    def _same_length(self, drafts: Drafts, rows: Seq[Sequence], steps: _Steps, room: int) -> Chosen:
        longest = min(
            max(len(draft.tokens) for draft in drafts.values()),
            min(map(_room, rows)),
            room // len(rows),
        )
        expected = list(
            accumulate(
                sum(draft.chances[i] for draft in drafts.values() if i < len(draft.chances))
                for i in range(longest)
            )
        )
        counts = [len(rows) * (i + 1) for i in range(longest)]
        best = steps.best_count(expected, counts)
        if not best:
            return {}
        return {s: _filled(s, drafts.get(s), best) for s in rows}


def _room(sequence: Sequence) -> int:
    """Draft tokens that can be kept: the step's own token must be one that is allowed, too."""
    return sequence.max_total_tokens - sequence.num_tokens - 1


def _cut(sequence: Sequence, draft: Draft | None) -> Draft | None:
    room = _room(sequence)
    if draft is None or room < 1:
        return None
    if len(draft.tokens) <= room:
        return draft
    return Draft(draft.tokens[:room], draft.chances[:room])


def _filled(sequence: Sequence, draft: Draft | None, length: int) -> list[int]:
    tokens = draft.tokens[:length] if draft else []
    return [*tokens, *[sequence.tokens[-1]] * (length - len(tokens))]
