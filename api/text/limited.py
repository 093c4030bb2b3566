"""Runs untrusted code, a model's chat template, in threads and with a time limit."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# With two threads, one slow template does not block all others. More would compete with the event
# loop for the interpreter.
THREADS = 2


class TookTooLong(BaseException):
    """The work exceeded its time limit.

    NOTE: no Exception, so that work which handles exceptions ends, too.
    """


@dataclass(slots=True)
class _Job:
    """The start of the work, in ``time.monotonic()`` seconds, and its thread; None before that."""

    started: float | None = None
    thread: int | None = None


class TimeLimitedThreads:
    """Runs work in threads and interrupts it after ``seconds``.

    Work is interrupted between two Python bytecodes, which is enough for a template's loops.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="chairlift-limited")
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread and returns its result.

        Raises:
            TookTooLong: it took longer than the time limit.
        """
        job = _Job()
        future = asyncio.wrap_future(self._pool.submit(partial(self._do, job, work)))
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=self._seconds)
                if job.started is not None and time.monotonic() - job.started >= self._seconds:
                    self._end(job)
        finally:
            # The caller has its result or is gone: unfinished work can be dropped.
            future.cancel()
            self._end(job)
        return future.result()

    def _do(self, job: _Job, work: Callable[[], T]) -> T:
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

    def _end(self, job: _Job) -> None:
        """Raises TookTooLong in the job's thread, if the job is running."""
        with self._lock:
            if job.thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(job.thread), ctypes.py_object(TookTooLong)
                )
