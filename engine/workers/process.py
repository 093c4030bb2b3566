"""One worker process, as seen by the process that gives it jobs."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from chairlift.engine.workers.job import (
    LOAD_SECONDS,
    MAX_FIXTURES,
    WALL_FACTOR,
    Answer,
    Fixture,
    Job,
    LoadFixture,
    RunJob,
    TooExpensive,
    WorkerFailed,
)
from chairlift.engine.workers.wire import receive, send

# Keeps libraries to one thread, because each thread would reserve 64 MB of address space.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_CHILD = "chairlift.engine.workers.child"


class _Killed(WorkerFailed):
    """A signal has ended the process before its job began, so the job is not the cause."""


class WorkerProcess:
    """A process that runs one job at a time. It starts with the first job, and again after its end.

    Only ``kill`` is thread-safe.

    Args:
        modules: the process imports these before its first job.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        # The keys of fixtures, in the order of their last use.
        self._loaded: dict[int, None] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> bool:
        """Starts the process if it does not run yet; returns whether it was started.

        Raises:
            WorkerFailed: it does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed by something else
        if self._process is not None:
            return False
        with self._lock:
            if self._closed:
                raise WorkerFailed("the workers are closed")
            # NOTE: in a new session the process does not get the terminal's Ctrl-C. It ends when
            # its standard input is closed.
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _CHILD, str(os.getpid()), *self._modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env=ENVIRONMENT | os.environ,
                )
            except OSError as error:  # there is no process, memory or open file left
                raise WorkerFailed(f"a worker process does not start: {error}") from error
        try:
            self._receive(self._process, LOAD_SECONDS)
        except (TimeoutError, EOFError) as error:
            raise self._failure("does not start", error) from None
        return True

    def run(self, job: Job) -> Any:
        """Runs a job and returns its result. A process that is killed as it loads starts once more.

        Raises:
            TooExpensive: it exceeded a limit, and its process was ended.
            WorkerFailed: the process does not start, was killed twice, or the job has a bug.
            ChairliftError: whatever the job raises.
        """
        try:
            key = self._prepare(job.fixture)
        except _Killed:  # such as by the kernel, which was out of memory
            key = self._prepare(job.fixture)
        return self._run(RunJob(job.function, job.args, job.cpu_seconds, key))

    def kill(self) -> None:
        """Ends the process permanently, on any thread, even within a job. ``close`` must follow."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Ends the process permanently and releases its pipes."""
        self.kill()
        if self._process is not None:
            self._end()

    def _prepare(self, fixture: Fixture | None) -> int | None:
        """Starts the process and loads the fixture, unless that is done; returns its key."""
        self.start()
        if fixture is None:
            return None
        self._load(fixture)
        return fixture.key

    def _load(self, fixture: Fixture) -> None:
        """Loads a fixture unless the process has it; beyond MAX_FIXTURES, another is dropped."""
        if fixture.key in self._loaded:
            del self._loaded[fixture.key]
        else:
            function, args = fixture.make()
            forgotten = next(iter(self._loaded)) if len(self._loaded) >= MAX_FIXTURES else None
            if forgotten is not None:  # also by a process that fails to load the next one
                del self._loaded[forgotten]
            message = LoadFixture(fixture.key, function, args, forgotten)
            try:
                self._ask(message, LOAD_SECONDS * WALL_FACTOR)
            except (TimeoutError, EOFError) as error:
                raise self._failure("does not load its fixture", error) from None
        self._loaded[fixture.key] = None

    def _run(self, job: RunJob) -> Any:
        seconds = job.cpu_seconds * WALL_FACTOR
        try:
            return self._ask(job, seconds)
        except TimeoutError:
            self._end()
            busy = f"takes longer than {seconds:g} s: this machine is too busy"
            raise TooExpensive(busy) from None
        except EOFError:
            code = self._end()
            if code == -signal.SIGPROF:
                raise TooExpensive(f"takes longer than {job.cpu_seconds:g} s") from None
            raise TooExpensive("takes more memory or stack than it may") from None

    def _failure(self, what: str, error: TimeoutError | EOFError) -> WorkerFailed:
        """Ends a process that did not get ready for its job; returns the error to raise."""
        code = self._end()
        if isinstance(error, EOFError) and code < 0:
            return _Killed(f"a worker process {what}: signal {-code} has ended it")
        return WorkerFailed(f"a worker process {what}")

    def _ask(self, message: LoadFixture | RunJob, seconds: float) -> Any:
        """Returns the process's answer to a message.

        Raises:
            TimeoutError: there is no answer in time.
            EOFError: the process has ended.
            ChairliftError: the answer is an error.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            send(process.stdin, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except BrokenPipeError:
            raise EOFError from None
        answer = self._receive(process, seconds)
        if answer.last:
            self._end()
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> Answer:
        """Waits for the process's next answer, at most ``seconds``.

        Raises:
            TimeoutError: there is no answer in time.
            EOFError: the process has ended.
        """
        assert process.stdout is not None
        # NOTE: select.select() does not support file descriptors above 1023.
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        if (data := receive(process.stdout)) is None:
            raise EOFError
        answer: Answer = pickle.loads(data)
        return answer

    def _end(self) -> int:
        """Ends the process; returns its exit code, or the negative number of the ending signal."""
        process, self._process = self._process, None
        self._loaded.clear()
        assert process is not None
        # A process that is about to end by itself keeps its exit code.
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode
