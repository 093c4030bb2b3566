"""Threads that compute parts of a compiled function's job, beside the thread that calls it.

A caller never waits for a thread that has not begun: it computes that thread's part itself. So a
call takes no longer than the caller alone would need, even if other processes use the cores. After
a job, a thread looks for the next one for some time before it sleeps, because waking it takes as
long as a product of few tokens. It does not sleep before the jobs of a program have ended.
"""

from __future__ import annotations

import ctypes
import threading
import time
from _thread import allocate_lock

from chairlift.engine.cpu import cores
from chairlift.engine.cpu.compiled.llvm import jobs as llvm_jobs
from chairlift.engine.cpu.compiled.llvm.jobs import COUNT, STATE_SIZE, Pool

# Seconds that a thread looks for the next job: longer than what Python does between two layers.
LOOKING_SECONDS = 500e-6
# Bytes of a cache line.
_LINE = 64
# Pauses from which their speed is measured.
_TRIAL_PAUSES = 5000


class _Worker:
    """A thread. ``sleeps`` is set by it, and cleared by the caller that wakes it."""

    def __init__(self, number: int, threads: WorkerThreads, pool: Pool) -> None:
        self.sleeps = False
        self._wake = allocate_lock()
        self._wake.acquire()
        self._threads, self._pool = threads, pool
        name = f"chairlift-products-{number}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def wake(self) -> None:
        self.sleeps = False
        self._wake.release()

    def _serve(self) -> None:
        seen = 0
        while True:
            threads = self._threads
            pauses = threads.pauses if threads.looks else 0
            seen = self._pool.serve(threads.address, seen, pauses)
            self.sleeps = True
            self._wake.acquire()


class WorkerThreads:
    """A number of threads, of which the caller is one. Any thread may call and change it.

    Attributes:
        looks: whether threads look for the next job before they sleep. Beside other processes that
            use the cores they should not.
        address: of the state that the threads share; see ``llvm.jobs``.
        pauses: those in LOOKING_SECONDS.
    """

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(8 * STATE_SIZE + _LINE)
        start = -ctypes.addressof(memory) % _LINE
        self._state = (ctypes.c_int64 * STATE_SIZE).from_buffer(memory, start)
        self.address = ctypes.addressof(self._state)
        self._threads = cores.available()
        self._workers: list[_Worker] = []
        self._busy = threading.Lock()
        self.looks = True
        self.pauses = 0

    def get(self) -> int:
        """See ``thread_count.ThreadSetting``."""
        return self._threads

    def set(self, threads: int) -> None:
        """See ``thread_count.ThreadSetting``."""
        self._threads = threads

    def run(self, job: int) -> bool:
        """Computes a job on all threads.

        Args:
            job: its address; see ``llvm.jobs``.

        Returns:
            False if another thread's job is being computed, and nothing was done.
        """
        pool = llvm_jobs.compiled()
        assert pool is not None
        if not self._busy.acquire(blocking=False):
            return False
        try:
            self._wake(pool)
            pool.run(self.address, job)
        finally:
            self._busy.release()
        return True

    def run_all(self, jobs: int, number: int) -> None:
        """Computes jobs one after the other: on all threads, or alone beside another thread's job.

        Args:
            jobs: the address of the first; see ``llvm.jobs``.
            number: how many there are.
        """
        pool = llvm_jobs.compiled()
        assert pool is not None
        if self._threads == 1 or not self._busy.acquire(blocking=False):
            pool.run_all(self.address, jobs, number, False)
            return
        try:
            self._wake(pool)
            pool.run_all(self.address, jobs, number, True)
        finally:
            self._busy.release()

    def _wake(self, pool: Pool) -> None:
        """Starts and wakes the other threads."""
        if len(self._workers) < self._threads - 1:
            self._start(pool)
        asleep = [worker for worker in self._workers[: self._threads - 1] if worker.sleeps]
        # A thread on the caller's own core would only delay it.
        if asleep and cores.available() > 1:
            for worker in asleep:
                worker.wake()

    def _start(self, pool: Pool) -> None:
        if not self.pauses:
            start = time.perf_counter()
            pool.serve(self.address, self._state[COUNT], _TRIAL_PAUSES)
            seconds = time.perf_counter() - start
            self.pauses = round(_TRIAL_PAUSES * LOOKING_SECONDS / seconds)
        for number in range(len(self._workers) + 1, self._threads):
            self._workers.append(_Worker(number, self, pool))


shared = WorkerThreads()
