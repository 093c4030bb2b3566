"""A time limit for C code that blocks the event loop and the interpreter, like a regex search."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# The next look at the clock is at least this far away, in seconds.
_SHORTEST = 0.001


class TimeUp(Exception):
    """The work exceeded its time limit."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """Calls ``work`` and returns its result; the event loop waits meanwhile.

    It works for regular expressions because they check for signals while they search. The limit is
    CPU time of this thread: neither other processes nor other threads use it up. Garbage is not
    collected meanwhile, since a collection in a large process can take longer than the work.
    Only the main thread may call this.

    Raises:
        TimeUp: ``work`` was not done after ``seconds`` of CPU time.
    """
    end = time.thread_time() + seconds
    over = False

    def look(number: int, frame: FrameType | None) -> None:
        # The timer counts the CPU time of all threads, so it is early rather than late.
        left = end - time.thread_time()
        if over:
            return
        if left <= 0:
            raise TimeUp
        signal.setitimer(signal.ITIMER_PROF, max(left, _SHORTEST))

    collects = gc.isenabled()
    before = signal.signal(signal.SIGPROF, look)
    try:
        gc.disable()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return work()
        finally:
            over = True
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        if collects:
            gc.enable()
        # A last signal may still be on its way; by default it would end the process.
        late = signal.SIG_IGN if before is signal.SIG_DFL else before
        signal.signal(signal.SIGPROF, late)
