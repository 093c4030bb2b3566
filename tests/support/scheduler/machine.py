"""A machine whose steps take a time that is linear in their work."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.scheduler.cost import Work


def machine(speed: float) -> Callable[[Work], float]:
    """The seconds of a step; speed 1 is an H200 with a model of 8B parameters."""

    def seconds(work: Work) -> float:
        rows = 1e-4 * work.rows + 1e-8 * work.context
        return (6e-3 + rows + 2.8e-5 * work.tokens + 1e-9 * work.pairs) / speed

    return seconds
