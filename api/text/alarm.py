"""A time limit for C code that blocks the event loop and the interpreter, like a regex search."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class TimeUp(Exception):
    """The work exceeded its time limit."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """Runs ``work`` in this thread, which must be the main one, and returns its result.

    An alarm signal ends the work: Python's regular expressions check for signals while they
    search.

    Raises:
        TimeUp: it took longer than ``seconds``.
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
