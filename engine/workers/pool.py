"""A pool of worker processes with one queue of jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, NamedTuple

from chairlift.engine.errors import QueueFull
from chairlift.engine.workers.job import Job, TooExpensive, WorkerFailed
from chairlift.engine.workers.process import WorkerProcess
from chairlift.engine.workers.turns import Turns

# With two, a job that has to be killed does not delay all others.
PROCESSES = 2
# Further jobs are refused when this many of the same client, or of all clients, are waiting, or so
# many bytes: that many of the largest bodies.
MAX_WAITING_OF_ONE, MAX_BYTES_OF_ONE = 128, 256 << 20
MAX_WAITING, MAX_BYTES = 512, 1 << 30
# A job that has waited longer than this is refused.
WAIT_SECONDS = 7.0
# A killed process ends at once; only making a fixture may take longer.
_CLOSE_SECONDS = 2.0

# The client of the current request: its key's name, or its address.
CLIENT: ContextVar[str] = ContextVar("client", default="")


class _Waiting(NamedTuple):
    """A job that waits for a process.

    Attributes:
        nbytes: see ``Job.nbytes``.
    """

    job: Job
    nbytes: int
    since: float
    future: Future[Any]


class Workers:
    """Runs jobs in worker processes, which start with the first job and stay until ``close``.

    Args:
        modules: the processes import these before their first job.
        processes: the maximum number of processes.
        record: called with the outcome of each job: "done", "refused" (it raised an exception),
            "ended" (it exceeded a limit) or "queue_full".
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        processes: int = PROCESSES,
        record: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._record = record
        self._processes = [WorkerProcess(modules) for _ in range(processes)]
        self._turns: Turns[_Waiting] = Turns()
        self._changed = threading.Condition()
        # Threads without a job, including those whose process is still starting.
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def warm(self) -> None:
        """Starts one process now, so that the first job does not have to wait for it."""
        with self._changed:
            if not self._threads and not self._closed:
                self._begin_thread()

    async def run(self, job: Job) -> Any:
        """Runs a job and returns its result.

        Raises:
            TooExpensive: it exceeded one of its limits.
            QueueFull: too many jobs are waiting, or this one has waited too long.
            WorkerFailed: no process can be started, or the job has a bug.
            ChairliftError: whatever the job raises.
        """
        outcome = "refused"
        try:
            value = await asyncio.wrap_future(self._submit(job))
            outcome = "done"
        except TooExpensive:
            outcome = "ended"
            raise
        except QueueFull:
            outcome = "queue_full"
            raise
        finally:
            self._record(outcome)
        return value

    def close(self) -> None:
        """Ends the processes. Waiting and running jobs fail with ``WorkerFailed``."""
        with self._changed:
            self._closed = True
            while len(self._turns):
                future = self._turns.take().future
                if future.set_running_or_notify_cancel():
                    future.set_exception(WorkerFailed("the server stops"))
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _submit(self, job: Job) -> Future[Any]:
        owner = CLIENT.get()
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise WorkerFailed("the server stops")
            nbytes = job.nbytes
            if self._is_full(owner, nbytes):
                raise QueueFull(
                    "too many large requests, images or grammars wait to be read", WAIT_SECONDS
                )
            self._turns.put(owner, _Waiting(job, nbytes, time.monotonic(), future))
            if len(self._turns) > self._idle and len(self._threads) < len(self._processes):
                self._begin_thread()
            self._changed.notify()
        return future

    def _is_full(self, owner: str, nbytes: int) -> bool:
        """Whether no further job of so many bytes may wait; an idle queue takes any."""
        own, all_jobs = self._turns.entries(owner), self._turns.entries()
        return any(
            len(jobs) >= most or (jobs and sum(each.nbytes for each in jobs) + nbytes > most_bytes)
            for jobs, most, most_bytes in (
                (own, MAX_WAITING_OF_ONE, MAX_BYTES_OF_ONE),
                (all_jobs, MAX_WAITING, MAX_BYTES),
            )
        )

    def _begin_thread(self) -> None:
        process = self._processes[len(self._threads)]
        thread = threading.Thread(
            target=self._work, args=(process,), name="chairlift-worker", daemon=True
        )
        thread.start()  # fails if the system has no thread left
        self._threads.append(thread)
        self._idle += 1

    def _work(self, process: WorkerProcess) -> None:
        """The loop of one thread: runs one job after the other in its process."""
        ready = 0.0
        while True:
            # A process that was ended is restarted at once, to be ready for the next job. If that
            # fails, the next job tries again and gets the error.
            try:
                started = process.start()
            except WorkerFailed:
                started = True
            if started:
                ready = time.monotonic()
            with self._changed:
                while not len(self._turns) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    process.close()
                    return
                job, _, since, future = self._turns.take()
                self._idle -= 1
            if future.set_running_or_notify_cancel():
                # The time in which the process started does not count as waiting.
                _fulfil(future, process, job, time.monotonic() - max(since, ready))
            with self._changed:
                self._idle += 1


def _fulfil(future: Future[Any], process: WorkerProcess, job: Job, waited: float) -> None:
    try:
        if waited > WAIT_SECONDS:
            raise QueueFull(
                "too many large requests, images or grammars wait to be read", WAIT_SECONDS
            )
        value = process.run(job)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)
