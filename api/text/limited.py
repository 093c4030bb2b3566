"""Runs untrusted code, a model's chat template, in threads and with a time limit."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# How often running work is looked at, in seconds.
_POLL_SECONDS = 0.05
# By how many bytes the process may grow meanwhile.
MAX_GROWTH = 1 << 30
_STATM = Path("/proc/self/statm")
# With two threads, one slow template does not block all others. More would compete with the event
# loop for the interpreter.
THREADS = 2


class TookTooLong(BaseException):
    """The work exceeded its limit of time or memory.

    NOTE: no Exception, so that work which handles exceptions ends, too.
    """


@dataclass(slots=True)
class _Job:
    """The work's start, in ``time.monotonic()`` seconds, its thread, and the process's memory then.

    They are None before.
    """

    started: float | None = None
    thread: int | None = None
    memory: int = 0


class TimeLimitedThreads:
    """Runs work in threads and interrupts it after ``seconds``, or when it takes too much memory.

    Work is interrupted between two Python bytecodes, which is enough for a template's loops.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="chairlift-limited")
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread and returns its result.

        Raises:
            TookTooLong: it took longer than the time limit, or too much memory.
        """
        job = _Job()
        future = asyncio.wrap_future(self._pool.submit(partial(self._do, job, work)))
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=min(_POLL_SECONDS, self._seconds))
                if job.started is not None and self._exceeds(job, job.started):
                    self._end(job)
        finally:
            # The caller has its result or is gone: unfinished work can be dropped.
            future.cancel()
            self._end(job)
        return future.result()

    def _do(self, job: _Job, work: Callable[[], T]) -> T:
        job.memory = _used_bytes()
        job.started = time.monotonic()
        job.thread = threading.get_ident()
        try:
            return work()
        finally:
            with self._lock:
                job.thread = None
            # NOTE: an exception that _end has just set is raised here, not later in the pool's
            # code, which does not expect it.
            time.sleep(0)

    def _exceeds(self, job: _Job, started: float) -> bool:
        is_late = time.monotonic() - started >= self._seconds
        return is_late or _used_bytes() - job.memory > MAX_GROWTH

    def _end(self, job: _Job) -> None:
        """Raises TookTooLong in the job's thread, if the job is running."""
        with self._lock:
            if job.thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(job.thread), ctypes.py_object(TookTooLong)
                )


def _used_bytes() -> int:
    """The memory that the process uses; without /proc, the maximum that it has used so far."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
