"""Measures how long steps without prompts take, by the number of their tokens.

The time grows in jumps: a device computes a few more tokens in the same time until they need one
more tile of its kernels, and the host takes its time for each step. So times are not fitted to a
line. But they grow with the context of the rows, which grows from step to step: times that were
measured with different contexts are compared as if all had the last one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import NamedTuple

from chairlift.cache.pages.page import step_size
from chairlift.scheduler.cost import Work

# Steps remembered of each size. Their time counts once there are KNOWN of them, because a machine
# is sometimes busy with something else.
REMEMBERED, KNOWN = 8, 3
# For the cost of context: the weight of a new step in the means, that of all earlier ones in the
# sums, and the share of the context by which steps differ enough to show its cost.
RATE, KEPT, CHANGE = 1 / 16, 255 / 256, 0.1


class Point(NamedTuple):
    """A measured time.

    Attributes:
        tokens: of the step.
        seconds: of the step.
    """

    tokens: float
    seconds: float


class Curve:
    """The seconds of a step by its tokens: straight lines between points.

    Args:
        points: in the order of their tokens, at least one. More tokens never take less time.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._tokens = [point.tokens for point in points]
        self._seconds = [*accumulate((point.seconds for point in points), max)]

    def seconds(self, tokens: int) -> float:
        """The seconds of a step of ``tokens`` tokens, at least as many as the first point has."""
        after = bisect_left(self._tokens, tokens)
        if after == 0:
            return self._seconds[0]
        if after == len(self._tokens):
            if after == 1:
                return self._seconds[0]
            after -= 1  # goes on as between the last two
        begin, end = self._tokens[after - 1], self._tokens[after]
        low, high = self._seconds[after - 1], self._seconds[after]
        return low + (high - low) * (tokens - begin) / (end - begin)

    def before(self, tokens: int) -> float:
        """The seconds of the last point with fewer tokens."""
        return self._seconds[max(0, bisect_left(self._tokens, tokens) - 1)]


class StepTimes:
    """The seconds of the last steps of each size, with drafts and without.

    Numbers of tokens that ``step_size`` maps to the same number are one size.

    Args:
        middle: the time of a size, from those of its steps. A step takes longer where the machine
            is busy with something else, but never less.
    """

    def __init__(self, middle: Callable[[Sequence[float]], float] = median) -> None:
        self._plain, self._drafted = _Sizes(middle), _Sizes(middle)
        # Sizes with drafts of which there was a step.
        self._begun: set[int] = set()

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long it took; ignores steps with prompts.

        The first step of a size with drafts does not count: something may happen only once in it,
        such as compiling a kernel.
        """
        self._plain.context = self._drafted.context = work.context
        if work.tokens:
            return
        step = _Step(work.rows + work.drafts, seconds, work.context)
        if not work.drafts:
            self._plain.learn(step)
        elif (size := step_size(work.rows + work.drafts)) in self._begun:
            self._drafted.learn(step)
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
        """The seconds of a step of ``rows`` rows without drafts; None if too few were measured."""
        # There may be few steps without drafts, and then their contexts hardly differ.
        point = self._plain.points(self._drafted.slope()).get(step_size(rows))
        return None if point is None else point.seconds

    def any_plain(self, rows: int) -> float | None:
        """As ``plain``, but from steps of other sizes where there are none of this one.

        As the largest size, if that has fewer rows; None if it does not have at least two thirds as
        many. Half as many rows may take as long, or half as long.
        """
        points = [*self._plain.points(self._drafted.slope()).values()]
        if not points or 3 * points[-1].tokens + 1 < 2 * rows:
            return None
        return Curve(points).seconds(min(rows, int(points[-1].tokens)))

    def drafted(self) -> dict[int, Point]:
        """The time of each size with drafts of which enough steps were measured, in order."""
        return self._drafted.points()


class _Step(NamedTuple):
    """A step, or the middle of several: its tokens, its seconds, and the context of its rows."""

    tokens: float
    seconds: float
    context: float


class _ContextCost:
    """How much longer a step takes for each token of its rows' context.

    It is the slope that is common to all sizes: within each, the time and the context of a step are
    compared with their means so far.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        self._products = self._squares = 0.0

    def learn(self, size: int, step: _Step, middle: _Step) -> None:
        """Learns from a step, unless something else than its context made it long.

        Args:
            middle: that of the last steps of its size.
        """
        seconds, context = self._means.setdefault(size, (middle.seconds, middle.context))
        if step.seconds > 2 * seconds:
            return
        longer, more = step.seconds - seconds, step.context - context
        self._products = KEPT * self._products + longer * more
        self._squares = KEPT * self._squares + more * more
        self._means[size] = seconds + RATE * longer, context + RATE * more

    def slope(self, context: float, expected: float) -> float:
        """The seconds of a token of context; as ``expected``, if no contexts have differed."""
        weight = (CHANGE * context) ** 2
        total = self._squares + weight
        return max(0.0, (self._products + weight * expected) / total) if total else expected


class _Sizes:
    """The last steps of each size.

    Attributes:
        context: the present one.
    """

    def __init__(self, middle: Callable[[Sequence[float]], float]) -> None:
        self.context = 0.0
        self._of_steps = middle
        self._context_cost = _ContextCost()
        self._steps: dict[int, deque[_Step]] = {}
        # The middle of those of which there are enough.
        self._middle: dict[int, _Step] = {}

    @property
    def steps(self) -> int:
        return sum(map(len, self._steps.values()))

    def learn(self, step: _Step) -> None:
        size = step_size(int(step.tokens))
        steps = self._steps.setdefault(size, deque(maxlen=REMEMBERED))
        steps.append(step)
        if len(steps) >= KNOWN:
            tokens, seconds, context = zip(*steps, strict=True)
            self._middle[size] = _Step(fmean(tokens), self._of_steps(seconds), fmean(context))
            self._context_cost.learn(size, step, self._middle[size])

    def slope(self, expected: float = 0.0) -> float:
        """See ``_ContextCost.slope``."""
        return self._context_cost.slope(self.context, expected)

    def points(self, expected_slope: float = 0.0) -> dict[int, Point]:
        """The time of each size of which enough steps were measured, at the present context."""
        slope, points = self.slope(expected_slope), {}
        for size, (tokens, seconds, context) in sorted(self._middle.items()):
            now = seconds + slope * (self.context - context)
            points[size] = Point(tokens, max(seconds / 2, now))
        return points

    def forget(self, size: int) -> None:
        self._steps.pop(size, None)
        self._middle.pop(size, None)
