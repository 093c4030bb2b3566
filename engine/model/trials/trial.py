"""Compares a faster replacement of some part of a model with the original, before it is used.

Both run on the same random input. If the results differ by more than rounding, the replacement is
not used. Model files and kernel compilers may raise anything, so every exception counts as "not
usable here".
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
    """The comparison for one kind of replacement.

    Attributes:
        agree: compares the candidate's result with the reference's, in this order.
        log: the logger of the module with the replacement.
        error: the line that is logged when something raises; contains a ``%s`` for the exception.
        level: the level of that line.
        mismatch: the warning that is logged when the results differ; None logs nothing.
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
        """Returns the result of ``call``; if it raises, logs that and returns None."""
        try:
            return call()
        except Exception as error:  # a model's own code or a compiler
            self.log.log(self.level, self.error, error)
            return None

    def _agree(self, expected: mx.array, actual: mx.array) -> bool:
        return self.agree(actual, expected)


def within_largest(tolerance: float) -> Callable[[mx.array, mx.array], bool]:
    """A comparison: all differences are at most ``tolerance`` times the largest reference value.

    A value that is not finite must not be finite in both arrays; apart from that it is ignored. A
    model may rule out tokens by -inf, and a row that overflows must not hide a difference in
    another row.
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


def within_rms(tolerance: float, share: float = 1.0) -> Callable[[mx.array, mx.array], bool]:
    """A comparison: in a ``share`` of the rows, the root mean square of the differences is at most
    ``tolerance`` times that of the reference. Values that are not finite count as in
    ``within_largest``.
    """

    def agree(actual: mx.array, expected: mx.array) -> bool:
        if actual.shape != expected.shape:
            return False
        finite = mx.isfinite(expected)
        same = (mx.isfinite(actual) == finite).all()
        difference = mx.where(finite, actual - expected, 0).square().sum(axis=-1)
        reference = mx.where(finite, expected, 0).square().sum(axis=-1)
        right = difference <= tolerance**2 * reference
        return bool((same & (right.sum() >= share * right.size)).item())

    return agree


def elementwise(tolerance: float) -> Callable[[mx.array, mx.array], bool]:
    """A comparison of each element, with ``tolerance`` as absolute and as relative tolerance."""

    def agree(actual: mx.array, expected: mx.array) -> bool:
        return bool(mx.allclose(actual, expected, rtol=tolerance, atol=tolerance).item())

    return agree


def identical(actual: mx.array, expected: mx.array) -> bool:
    """Whether both arrays have the same numbers."""
    return bool(mx.array_equal(actual, expected).item())
