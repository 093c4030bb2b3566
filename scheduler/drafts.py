"""Chooses how many proposed tokens of each row a step verifies.

A verified token costs time and is kept only with some probability. So the choice maximizes the
expected tokens per second of the step: tokens with the best chances first, and none at all if the
step is better without. How long steps with more tokens take is measured (``step_times``), and sizes
that may be better than they were, or were never measured, are tried from time to time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple, Protocol

from chairlift.cache.pages.page import step_size
from chairlift.scheduler.cost import Work
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_times import KNOWN, Curve, Point, StepTimes

# A step with drafts must be expected to be better by this factor: predictions have errors.
MIN_GAIN = 1.03
# The first FIRST_STEPS steps with drafts try FIRST_TOKENS draft tokens for each row, one of these
# numbers after the other, whatever they cost; but at most MAX_FIRST in total, or one for each row.
FIRST_TOKENS, FIRST_STEPS, MAX_FIRST = (0.25, 1.0, 4.0), 3 * KNOWN, 64
# Steps from one trial of another size to the next. Their number doubles with each trial, and is the
# minimum again when the size that was tried is chosen afterwards.
MIN_PERIOD, MAX_PERIOD = 8, 1 << 13
# Steps for which a measured time is trusted, longer if trials are rarer: the machine may have been
# busy with something else when it was measured.
TRUSTED = 256
# After this many steps, some are computed without drafts, to measure such steps again.
PLAIN_TRUSTED = 1024
# Fills short drafts where all must have one length. It is no token, so it is never right; the model
# reads any token in its place.
FILLER = -(1 << 31)


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


class DraftChooser:
    """Chooses the drafts of each step.

    Args:
        uniform: all rows of a step need drafts of the same length, because padding would corrupt
            recurrent states. Shorter drafts then end with FILLER.
    """

    def __init__(self, uniform: bool) -> None:
        self._uniform = uniform
        self._times = StepTimes()
        # Planned steps, and for each size the last one with drafts, and the last one without.
        self._steps = 0
        self._last: dict[int, int] = {}
        self._last_plain: dict[int, int] = {}
        # The step of the last trial, its size, and the steps until the next one.
        self._tried_at, self._tried, self._period = 0, 0, MIN_PERIOD

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        self._times.learn(work, seconds)
        if not (work.tokens or work.drafts):
            self._last_plain[step_size(work.rows)] = self._steps

    def count_step(self, rows: int, drafts: Mapping[Sequence, Seq[int]]) -> None:
        """Counts a planned step of ``rows`` rows with these drafts."""
        self._steps += 1
        if drafts:
            self._last[step_size(rows + sum(map(len, drafts.values())))] = self._steps

    def choose(self, drafts: Drafts, rows: Seq[Sequence], room: int) -> Chosen:
        """Chooses the drafts of a step without prompts.

        Args:
            drafts: what is proposed for some of the rows.
            rows: the sequences that gain a token.
            room: maximum tokens of all drafts together.

        Returns:
            The first tokens of some of the drafts.
        """
        own = {s: draft for s in rows if (draft := _cut(s, drafts.get(s)))}
        size = step_size(len(rows))
        if self._steps - self._last_plain.get(size, 0) > PLAIN_TRUSTED:
            self._times.forget(size, drafted=False)
        plain = self._times.plain(len(rows))
        if not own or plain is None:
            return {}
        options: _Options
        if self._uniform:
            options = _SameLength(own, rows, room)
        else:
            options = _BestChances(own, len(rows), room)
        if self._times.drafted_steps < FIRST_STEPS:
            return options.take(self._first(options, len(rows)))
        return options.take(self._best(options, len(rows), plain))

    def _first(self, options: _Options, rows: int) -> int:
        """The draft tokens of one of the first steps with any."""
        few = math.ceil(rows * FIRST_TOKENS[self._times.drafted_steps % len(FIRST_TOKENS)])
        few = min(few, max(rows, MAX_FIRST))
        enough = (option for option in options.gains if option[0] >= few)
        count, gain = next(enough, options.gains[-1] if options.gains else (0, 0.0))
        return count if gain >= (MIN_GAIN - 1) * rows else 0

    def _best(self, options: _Options, rows: int, plain: float) -> int:
        """The draft tokens with the highest expected rate, or those of a trial; 0 for none."""
        known = self._times.drafted()
        curve = Curve([Point(rows, plain), *(p for p in known.values() if p.tokens > rows)])
        best, best_rate = 0, MIN_GAIN * rows / plain
        for count, gain in options.gains:
            rate = (rows + gain) / curve.seconds(rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best and step_size(rows + best) == self._tried:
            self._tried, self._period = 0, MIN_PERIOD
        due = self._steps - self._tried_at >= self._period
        if not due and self._tried in known:
            return best
        # A step takes at least as long as a smaller one whose time can be trusted.
        trusted = {size: point for size, point in known.items() if not self._is_old(size)}
        least = Curve([Point(rows, plain), *(p for p in trusted.values() if p.tokens > rows)])
        for count, gain in options.gains:
            size = step_size(rows + count)
            if size in trusted or count == best or not (due or size == self._tried):
                continue
            if (rows + gain) / least.before(rows + count) > MIN_GAIN * best_rate:
                self._try(size)
                return count
        return best

    def _try(self, size: int) -> None:
        """Begins to measure a size, or continues to."""
        self._tried_at = self._steps
        if size != self._tried:
            self._tried = size
            self._period = min(2 * self._period, MAX_PERIOD)
            self._times.forget(size, drafted=True)

    def _is_old(self, size: int) -> bool:
        """Whether a size may have become better since it was measured."""
        return self._steps - self._last.get(size, 0) > max(TRUSTED, self._period)


class _Options(Protocol):
    """The draft tokens that a step could have."""

    @property
    def gains(self) -> Seq[tuple[int, float]]:
        """Numbers of draft tokens, ascending, each with the tokens that it is expected to gain."""
        ...

    def take(self, count: int) -> Chosen:
        """The drafts of ``count`` tokens, one of the numbers in ``gains``, or 0."""
        ...


class _BestChances:
    """The tokens with the best chances, as many as fill a size of a step.

    Chances never rise within a draft, so its first tokens lead.
    """

    def __init__(self, drafts: Drafts, rows: int, room: int) -> None:
        self._drafts = drafts
        chances = [chance for draft in drafts.values() for chance in draft.chances]
        self._owners = [sequence for sequence, draft in drafts.items() for _ in draft.chances]
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:room]
        self._ranked = order
        expected = [*accumulate(map(chances.__getitem__, order), initial=0.0)]
        counts: list[int] = []
        while (last := counts[-1] if counts else 0) < len(order):
            counts.append(min(step_size(rows + last + 1) - rows, len(order)))
        self.gains = [(count, expected[count]) for count in counts]

    def take(self, count: int) -> Chosen:
        counts = Counter(map(self._owners.__getitem__, self._ranked[:count]))
        return {s: self._drafts[s].tokens[:number] for s, number in counts.items()}


class _SameLength:
    """Drafts of the same length for all rows."""

    def __init__(self, drafts: Drafts, rows: Seq[Sequence], room: int) -> None:
        self._drafts, self._rows = drafts, rows
        longest = min(
            max(len(draft.tokens) for draft in drafts.values()),
            min(map(_room, rows)),
            room // len(rows),
        )
        gains = accumulate(
            math.fsum(draft.chances[i] for draft in drafts.values() if i < len(draft.chances))
            for i in range(longest)
        )
        self.gains = [(len(rows) * number, gain) for number, gain in enumerate(gains, 1)]

    def take(self, count: int) -> Chosen:
        length = count // len(self._rows)
        return {s: _filled(self._drafts.get(s), length) for s in self._rows} if length else {}


def _room(sequence: Sequence) -> int:
    """Draft tokens that can be kept: the step's own token must be one that is allowed, too."""
    return sequence.max_total_tokens - sequence.num_tokens - 1


def _cut(sequence: Sequence, draft: Draft | None) -> Draft | None:
    if draft is None or (room := _room(sequence)) < 1:
        return None
    if len(draft.tokens) <= room:
        return draft
    return Draft(draft.tokens[:room], draft.chances[:room])


def _filled(draft: Draft | None, length: int) -> list[int]:
    tokens = draft.tokens[:length] if draft else []
    return [*tokens, *[FILLER] * (length - len(tokens))]
