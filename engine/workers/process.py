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
        except (TimeoutError, EOFError):
            self._end()
            raise WorkerFailed("a worker process does not start") from None
        return True

    def run(self, job: Job) -> Any:
        """Runs a job and returns its result.

        Raises:
            TooExpensive: it exceeded a limit, and its process was ended.
            WorkerFailed: the process does not start, or the job has a bug.
            ChairliftError: whatever the job raises.
        """
        self.start()
        fixture = job.fixture
        if fixture is not None:
            self._load(fixture)
        key = None if fixture is None else fixture.key
        return self._ask(RunJob(job.function, job.args, job.cpu_seconds, key), job.cpu_seconds)

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

    def _load(self, fixture: Fixture) -> None:
        """Loads a fixture unless the process has it; beyond MAX_FIXTURES, another is dropped."""
        if fixture.key in self._loaded:
            del self._loaded[fixture.key]
        else:
            function, args = fixture.make()
            forgotten = next(iter(self._loaded)) if len(self._loaded) >= MAX_FIXTURES else None
            if forgotten is not None:  # also by a process that fails to load the next one
                del self._loaded[forgotten]
            try:
                self._ask(LoadFixture(fixture.key, function, args, forgotten), LOAD_SECONDS)
            except TooExpensive:
                raise WorkerFailed("a worker process does not load its fixture") from None
        self._loaded[fixture.key] = None

    def _ask(self, message: LoadFixture | RunJob, seconds: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            try:
                send(process.stdin, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
            except BrokenPipeError:
                raise EOFError from None
            answer = self._receive(process, seconds * WALL_FACTOR)
        except TimeoutError:
            self._end()
            busy = f"takes longer than {seconds * WALL_FACTOR:g} s: this machine is too busy"
            raise TooExpensive(busy) from None
        except EOFError:
            code = self._end()
            if code == -signal.SIGPROF:
                raise TooExpensive(f"takes longer than {seconds:g} s") from None
            raise TooExpensive("takes more memory or stack than it may") from None
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
