"""Tries a faster replacement of some part of a model against the part itself, before it is used.

A replacement computes what the reference computes, up to rounding, or it is not used: it runs on
the same random input, and the results are compared. Model files and kernel compilers may raise
anything, so every exception counts as "not usable here".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """How one kind of replacement is tried.

    Attributes:
        agree: compares the candidate's result with the reference's, in this order.
        log: of the module whose replacement it is.
        error: the line that is logged when something raises; it has a ``%s`` for the exception.
        level: the level of that line.
        mismatch: the warning that is logged when the results differ; None for none.
    """

    agree: Callable[[mx.array, mx.array], bool]
    log: logging.Logger
    error: str
    level: int = logging.DEBUG
    mismatch: str | None = None

    def passes(self, reference: Callable[[], mx.array], candidate: Callable[[], mx.array]) -> bool:
        """Runs both and compares; False if the results differ or one of the two raises."""
        agreed = self.attempt(lambda: self._agree(reference(), candidate()))
        if agreed is False and self.mismatch is not None:
            self.log.warning(self.mismatch)
        return bool(agreed)

    def attempt(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None, and a log line, if it raises."""
        try:
            return call()
        except Exception as error:  # a model's own code or a compiler
            self.log.log(self.level, self.error, error)
            return None

    def _agree(self, expected: mx.array, actual: mx.array) -> bool:
        return self.agree(actual, expected)


def within_largest(tolerance: float) -> Callable[[mx.array, mx.array], bool]:
    """Compares arrays whose differences are at most ``tolerance`` of the largest reference value.

    Values that are not finite have to be so in both and count for nothing else: a model may rule
    tokens out by -inf, and a row that overflows its type must not hide a difference in another.
    """

    def agree(actual: mx.array, expected: mx.array) -> bool:
        if actual.shape != expected.shape:
            return False
        finite = mx.isfinite(expected)
        same = (mx.isfinite(actual) == finite).all()
        difference = mx.where(finite, mx.abs(actual - expected), 0).max()
        largest = mx.where(finite, mx.abs(expected), 0).max()
        return bool((same & (difference <= tolerance * largest)).item())

    return agree


def elementwise(tolerance: float) -> Callable[[mx.array, mx.array], bool]:
    """Compares each element, with ``tolerance`` as the absolute and the relative one."""

    def agree(actual: mx.array, expected: mx.array) -> bool:
        return bool(mx.allclose(actual, expected, rtol=tolerance, atol=tolerance).item())

    return agree


def identical(actual: mx.array, expected: mx.array) -> bool:
    """Whether both are the same numbers."""
    return bool(mx.array_equal(actual, expected).item())
