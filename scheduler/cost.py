"""Predicts how long a step takes: a linear fit through earlier steps."""

from __future__ import annotations

import math
from collections import deque
from operator import mul
from typing import NamedTuple

# Steps remembered of each sort, with prompts and without: enough to average out a machine's noise,
# few enough to follow it when it changes.
REMEMBERED = 64


class Work(NamedTuple):
    """What a step computes: ``rows`` gain a token and attend to ``context`` tokens in all; of
    so many ``prompts`` ``tokens`` are computed, which attend to ``pairs`` of a token and one before
    it; of them ``scored`` have their logits computed.
    """

    rows: int = 0
    context: int = 0
    tokens: int = 0
    pairs: int = 0
    prompts: int = 0
    scored: int = 0

    def with_chunk(self, begun: int, tokens: int, scored: bool = False) -> Work:
        """The same with the ``tokens`` of a prompt that follow its first ``begun``."""
        pairs = tokens * begun + tokens * (tokens + 1) // 2
        return Work(
            self.rows,
            self.context,
            self.tokens + tokens,
            self.pairs + pairs,
            self.prompts + 1,
            self.scored + (tokens if scored else 0),
        )

    @property
    def scaled(self) -> tuple[float, ...]:
        """The numbers and 1 for the step as such, all of them around 1 where they matter.

        What cannot be told apart yet is put down to the first of them: prompts are cut short then,
        and soon it can.
        """
        return (
            self.tokens / 512,
            self.pairs / 262144,
            self.prompts / 2,
            self.scored / 512,
            self.rows / 64,
            self.context / 65536,
            1.0,
        )


_SIZE = len(Work().scaled)
# A clock may not have moved between two steps.
SHORTEST = 1e-6
# What is left in the sums, by rounding, of a number that no remembered step has.
UNSEEN = 1e-6
# From the costs known so far, a few rounds come as near to the best as the steps allow.
ROUNDS = 10


class CostModel:
    """Predicts a step's seconds; least squares over the last steps with prompts and without.

    What is squared is the error relative to what a step took, so that one that took far too long
    (something was compiled, the machine was busy) says little. Costs below 0 are not considered.
    Learning a step takes the same time however many there were.
    """

    def __init__(self) -> None:
        self._steps: dict[bool, deque[list[float]]] = {False: deque(), True: deque()}
        # Sums over the remembered steps of their numbers by second, and of each two multiplied.
        self._sums = [0.0] * _SIZE
        self._products = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._costs = [0.0] * _SIZE

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        steps = self._steps[work.tokens > 0]
        seconds = max(seconds, SHORTEST)
        steps.append([number / seconds for number in work.scaled])
        self._count(steps[-1], 1)
        if len(steps) > REMEMBERED:
            self._count(steps.popleft(), -1)
        self._fit()

    def seconds(self, work: Work) -> float:
        """The expected seconds of a step; 0 while nothing is known."""
        return math.fsum(map(mul, self._costs, work.scaled))

    def tokens_within(self, work: Work, seconds: float, begun: int, scored: bool = False) -> float:
        """How many more tokens of a prompt, of which ``begun`` are computed, fit a step."""
        expected = self.seconds(work.with_chunk(begun, 0))
        each = self.seconds(work.with_chunk(begun, 1, scored)) - expected
        if expected >= seconds:
            return 0.0
        return (seconds - expected) / each if each > 0 else math.inf

    def _count(self, numbers: list[float], sign: int) -> None:
        for i, number in enumerate(numbers):
            self._sums[i] += sign * number
            row = self._products[i]
            for j, other in enumerate(numbers):
                row[j] += sign * number * other

    def _fit(self) -> None:
        """Fits the costs by Gauss-Seidel on the normal equations."""
        costs = self._costs
        for _ in range(ROUNDS):
            for i, row in enumerate(self._products):
                if row[i] > UNSEEN:
                    rest = self._sums[i] - sum(map(mul, row, costs)) + row[i] * costs[i]
                    costs[i] = max(0.0, rest / row[i])
