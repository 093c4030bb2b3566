"""Ends, after a while, work in C that neither returns to the loop nor to the interpreter."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class TimeUp(Exception):
    """The work was not done in its time."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises; everything else waits meanwhile.

    Regular expressions look for signals while they search. Only for the main thread.

    Raises:
        TimeUp: it was not done in its time.
    """
    before = signal.signal(signal.SIGALRM, _ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeUp
