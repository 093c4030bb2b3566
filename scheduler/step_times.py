"""Measures how long steps without prompts take, by the number of their tokens.

A device computes some tokens as fast as a few more, then a further one takes a while: its kernels
have tiles, and the host needs its time for each step. So the times are not fitted to a line.
"""

from __future__ import annotations

from collections import deque
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
        self._plain, self._drafted = _Sizes(), _Sizes()
        # Sizes with drafts of which there was a step.
        self._begun: set[int] = set()

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long it took; ignores steps with prompts.

        The first step of a size with drafts does not count: something may happen only once in it,
        such as compiling a kernel.
        """
        if work.tokens:
            return
        point = Point(work.rows + work.drafts, seconds)
        if not work.drafts:
            self._plain.learn(point)
        elif (size := step_size(work.rows + work.drafts)) in self._begun:
            self._drafted.learn(point)
        else:
            self._begun.add(size)

    def forget(self, size: int, drafted: bool) -> None:
        """Forgets the times of a size, so that it is measured anew."""
        (self._drafted if drafted else self._plain).forget(size)

    @property
    def drafted_steps(self) -> int:
        """The number of remembered steps with drafts."""
        return self._drafted.steps

    def plain(self, rows: int) -> float | None:
        """The seconds of a step of so many rows without drafts; None if too few were measured."""
        point = self._plain.middle.get(step_size(rows))
        return None if point is None else point.seconds

    def drafted(self) -> dict[int, Point]:
        """The time of each size with drafts of which enough steps were measured, in order."""
        return dict(sorted(self._drafted.middle.items()))


class _Sizes:
    """The last steps of each size.

    Attributes:
        middle: the middle of those of which there are enough.
    """

    def __init__(self) -> None:
        self._points: dict[int, deque[Point]] = {}
        self.middle: dict[int, Point] = {}

    @property
    def steps(self) -> int:
        return sum(map(len, self._points.values()))

    def learn(self, point: Point) -> None:
        size = step_size(int(point.tokens))
        points = self._points.setdefault(size, deque(maxlen=REMEMBERED))
        points.append(point)
        if len(points) >= KNOWN:
            tokens, seconds = zip(*points, strict=True)
            self.middle[size] = Point(fmean(tokens), median(seconds))

    def forget(self, size: int) -> None:
        self._points.pop(size, None)
        self.middle.pop(size, None)
