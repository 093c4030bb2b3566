"""Predicts how long a step takes: a linear fit through earlier steps."""

from __future__ import annotations

import math
from collections import deque
from operator import mul
from typing import NamedTuple

# Steps remembered of each kind: enough to average out a machine's noise, few enough to follow it
# when it changes. A kind has a magnitude, too, because a fit through steps of few rows alone would
# say nothing about many rows.
REMEMBERED = 24
# A step is forgotten after this many later ones in any case.
MAX_AGE = 1 << 14


class Work(NamedTuple):
    """The work of a step, in the numbers that its time depends on.

    Attributes:
        rows: rows that gain a token.
        context: tokens that these rows attend to, in total.
        tokens: prompt tokens.
        pairs: pairs of a prompt token and a token that it attends to.
        prompts: prompts with a chunk in the step.
        scored: prompt tokens whose logits are computed.
        drafts: proposed tokens of rows that are verified.
    """

    rows: int = 0
    context: int = 0
    tokens: int = 0
    pairs: int = 0
    prompts: int = 0
    scored: int = 0
    drafts: int = 0

    def with_chunk(self, begun: int, tokens: int, scored: bool = False) -> Work:
        """This work plus a chunk of ``tokens`` tokens that follow a prompt's first ``begun``."""
        pairs = tokens * begun + tokens * (tokens + 1) // 2
        return Work(
            self.rows,
            self.context,
            self.tokens + tokens,
            self.pairs + pairs,
            self.prompts + 1,
            self.scored + (tokens if scored else 0),
            self.drafts,
        )

    @property
    def scaled(self) -> tuple[float, ...]:
        """The numbers scaled to about 1 where they matter, and a constant 1 for the step itself.

        While the steps so far cannot tell two costs apart, the fit attributes them to the earlier
        number. Prompts come first: their chunks become smaller, and such steps separate the costs.
        So do steps without drafts, if drafts seem expensive. Steps of rows alone may be compiled,
        so the first prompt token and the first draft may have a cost of their own.
        """
        return (
            self.tokens / 512,
            self.pairs / 262144,
            self.prompts / 2,
            float(self.tokens > 0),
            self.scored / 512,
            self.drafts / 64,
            float(self.drafts > 0),
            self.rows / 64,
            self.context / 65536,
            1.0,
        )


_SIZE = len(Work().scaled)
# The least time of a step: the clock may not have advanced between two steps.
MIN_SECONDS = 1e-6
# Rounding errors stay below this in the sum of a number that no remembered step has.
UNSEEN = 1e-6
# The fit starts from the last costs, so a few rounds for each new step are enough. More new steps
# than the second number need no more rounds.
ROUNDS, MAX_UNFITTED = 10, 10


class _Kind(NamedTuple):
    """Steps that are remembered together: of similar work, and as many tokens up to a factor of 2.

    Attributes:
        drafts: whether they have drafts.
        prompts: whether they have prompts, and perhaps drafts.
        magnitude: the bits of the number of their tokens.
    """

    drafts: bool
    prompts: bool
    magnitude: int


def _kind(work: Work) -> _Kind:
    magnitude = (work.rows + work.drafts + work.tokens).bit_length()
    return _Kind(bool(work.drafts) and not work.tokens, bool(work.tokens), magnitude)


class _Step(NamedTuple):
    """A remembered step: its number, and its scaled work divided by its seconds."""

    number: int
    work: list[float]


class CostModel:
    """Predicts a step's seconds by least squares over the last steps of each kind.

    The fit squares the error relative to a step's time, so that an outlier (something was compiled,
    the machine was busy) has little weight. Costs are never below 0. Learning a step takes constant
    time; the fit is made when a prediction is asked for, which most steps without prompts do not.
    """

    def __init__(self) -> None:
        self._steps: dict[_Kind, deque[_Step]] = {}
        self._learned = 0
        # The normal equations: sums of the scaled numbers divided by the step's seconds, and of
        # their pairwise products.
        self._sums = [0.0] * _SIZE
        self._products = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._costs = [0.0] * _SIZE
        # Steps learned since the last fit.
        self._unfitted = 0

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        steps = self._steps.setdefault(_kind(work), deque())
        seconds = max(seconds, MIN_SECONDS)
        self._learned += 1
        scaled = [number / seconds for number in work.scaled]
        steps.append(_Step(self._learned, scaled))
        self._count(steps[-1].work, 1)
        if len(steps) > REMEMBERED:
            self._count(steps.popleft().work, -1)
        for others in self._steps.values():
            if others and others[0].number <= self._learned - MAX_AGE:
                self._count(others.popleft().work, -1)
        self._unfitted += 1

    def seconds(self, work: Work) -> float:
        """The predicted seconds of a step; 0 before the first step was learned."""
        if self._unfitted:
            self._fit(ROUNDS * min(self._unfitted, MAX_UNFITTED))
            self._unfitted = 0
        return math.fsum(map(mul, self._costs, work.scaled))

    def tokens_within(self, work: Work, seconds: float, begun: int, scored: bool = False) -> float:
        """Returns how many more tokens of a prompt fit into a step of at most ``seconds``.

        Args:
            work: the work of the step so far.
            seconds: the time that the step may take.
            begun: the prompt's tokens that are computed.
            scored: whether the prompt's logits are computed.
        """
        one, two = (self.seconds(work.with_chunk(begun, count, scored)) for count in (1, 2))
        room, second = seconds - one, two - one
        if room == math.inf:
            return room
        # Each further token attends to one token more than the one before it, and costs ``more``.
        more = self.seconds(Work(pairs=1)) - self.seconds(Work())
        if room <= 0:
            return max(0.0, 1 + room / second) if second > 0 else 0.0
        # The positive root of more / 2 * n ** 2 + (second - more / 2) * n - room, in a form that
        # stays exact where ``more`` is tiny or 0.
        linear = max(0.0, second - more / 2)
        slope = linear + math.sqrt(linear**2 + 2 * max(0.0, more) * room)
        return 1 + 2 * room / slope if slope > 0 else math.inf

    def _count(self, numbers: list[float], sign: int) -> None:
        """Adds a step to the sums (``sign`` 1), or removes it (-1)."""
        # Steps without prompts and drafts have only three.
        others = [(i, number) for i, number in enumerate(numbers) if number]
        for i, number in others:
            self._sums[i] += sign * number
            row = self._products[i]
            for j, other in others:
                row[j] += sign * number * other

    def _fit(self, rounds: int) -> None:
        """Fits the costs by Gauss-Seidel on the normal equations."""
        costs = self._costs
        for _ in range(rounds):
            for i, row in enumerate(self._products):
                if row[i] > UNSEEN:
                    rest = self._sums[i] - sum(map(mul, row, costs)) + row[i] * costs[i]
                    costs[i] = max(0.0, rest / row[i])
