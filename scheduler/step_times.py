"""Measures how long steps without prompts take, by the number of their tokens.

A device computes some tokens as fast as a few more, then a further one takes a while: its kernels
have tiles, and the host needs its time for each step. So the times are not fitted to a line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean, median
from typing import NamedTuple

from chairlift.cache.pages.page import step_size
from chairlift.scheduler.cost import Work

# Steps remembered of each size. Their median counts once there are so many, because a machine is
# sometimes busy with something else.
REMEMBERED, KNOWN = 8, 3


class Point(NamedTuple):
    """A measured time.

    Attributes:
        tokens: of the step.
        seconds: of the step.
    """

    tokens: float
    seconds: float


class StepTimes:
    """The seconds of the last steps of each size, with drafts and without.

    Numbers of tokens that ``step_size`` maps to the same number are one size.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[Point]] = {}
        self._drafted: dict[int, deque[Point]] = {}

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long it took; ignores steps with prompts.

        The first step of a size with drafts does not count: something may happen only once in it,
        such as compiling a kernel.
        """
        if work.tokens:
            return
        tokens = work.rows + work.drafts
        steps = self._drafted if work.drafts else self._plain
        if work.drafts and step_size(tokens) not in steps:
            steps[step_size(tokens)] = deque(maxlen=REMEMBERED)
        else:
            steps.setdefault(step_size(tokens), deque(maxlen=REMEMBERED)).append(
                Point(tokens, seconds)
            )

    def forget(self, size: int) -> None:
        """Forgets the times of a size with drafts, so that it is measured anew."""
        if size in self._drafted:
            self._drafted[size].clear()

    @property
    def drafted_steps(self) -> int:
        """The number of remembered steps with drafts."""
        return sum(map(len, self._drafted.values()))

    def plain(self, rows: int) -> float | None:
        """The seconds of a step of so many rows without drafts; None if too few were measured."""
        steps = self._plain.get(step_size(rows), ())
        return _middle(steps).seconds if len(steps) >= KNOWN else None

    def drafted(self) -> dict[int, Point]:
        """The time of each size with drafts of which enough steps were measured, in order."""
        sizes = sorted(self._drafted.items())
        return {size: _middle(steps) for size, steps in sizes if len(steps) >= KNOWN}


def _middle(steps: Iterable[Point]) -> Point:
    tokens, seconds = zip(*steps, strict=True)
    return Point(fmean(tokens), median(seconds))
