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
    """Calls ``work`` and returns its result; the event loop waits meanwhile.

    It works for regular expressions because they check for signals while they search. The limit is
    CPU time of this process, so that other processes do not use it up. Only the main thread may
    call this.

    Raises:
        TimeUp: ``work`` was not done after ``seconds`` of CPU time.
    """
    before = signal.signal(signal.SIGPROF, _ring)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeUp
