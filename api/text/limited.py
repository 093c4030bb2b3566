"""Runs code that nobody answers for, a model's chat template, beside the loop, for a while."""

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

# One that has to be ended does not hold up all others; more would take the interpreter from the
# event loop.
THREADS = 2


class TookTooLong(Exception):
    """The work was not done in its time."""


@dataclass(slots=True)
class _Job:
    """``started`` in seconds of ``time.monotonic()``, and in which thread; None: not yet."""

    started: float | None = None
    thread: int | None = None


class Limited:
    """Threads in which each piece of work may take ``seconds``, and is ended after that.

    Ended between two of Python's bytecodes, that is: a template's loops are made of those.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="chairlift-limited")
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises.

        Raises:
            TookTooLong: it was not done in its time.
        """
        job = _Job()
        future = asyncio.wrap_future(self._pool.submit(partial(self._do, job, work)))
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=self._seconds)
                if job.started is not None and time.monotonic() - job.started >= self._seconds:
                    self._end(job)
        finally:
            # Nobody waits for it any more: it need not begin, or go on.
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
            # NOTE: if it was ended just now, it learns of it here, and not where the pool does not
            # expect it.
            time.sleep(0)

    def _end(self, job: _Job) -> None:
        """Raises TookTooLong where it runs; does nothing to what has not begun or is done."""
        with self._lock:
            if job.thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(job.thread), ctypes.py_object(TookTooLong)
                )
