"""Threads that compute parts of one call, beside the thread that makes it.

A caller never waits for a thread that has not started: it computes that thread's part itself. So a
call takes no longer than the caller alone would need, even if other processes use the cores.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable
from queue import SimpleQueue

from chairlift.engine.cpu import cores


class _Job:
    """One call, and the lock that its last part releases."""

    __slots__ = ("_finished", "_part")

    def __init__(self, part: Callable[[], int]) -> None:
        self._part = part
        self._finished = allocate_lock()
        self._finished.acquire()

    def work(self) -> bool:
        """Computes what is left; whether this finished the last part."""
        last = bool(self._part())
        if last:
            self._finished.release()
        return last

    def wait(self) -> None:
        """Waits until all parts are finished."""
        self._finished.acquire()


class WorkerThreads:
    """A number of threads, of which the caller is one. Any thread may call and change it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads = cores.available()
        self._started = 1
        self._starting = threading.Lock()

    def get(self) -> int:
        """See ``thread_count.ThreadSetting``."""
        return self._threads

    def set(self, threads: int) -> None:
        """See ``thread_count.ThreadSetting``."""
        self._threads = threads

    def run(self, part: Callable[[], int]) -> None:
        """Calls ``part`` on all threads, and returns once all parts are finished.

        Args:
            part: takes and computes parts until none is left, without the interpreter's lock.
                Returns a true value only to the thread that finished the last one.
        """
        if self._started < self._threads:
            self._start()
        job = _Job(part)
        for _ in range(self._threads - 1):
            self._jobs.put(job)
        if not job.work():
            job.wait()

    def _start(self) -> None:
        with self._starting:
            for number in range(self._started, self._threads):
                name = f"chairlift-products-{number}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
                self._started += 1

    def _serve(self) -> None:
        while True:
            self._jobs.get().work()


shared = WorkerThreads()
