"""One worker process, from the side that gives it jobs."""

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
    WALL_FACTOR,
    Answer,
    Job,
    Load,
    Run,
    TooExpensive,
    WorkerFailed,
)
from chairlift.engine.workers.wire import receive, send

# Each thread of a library would reserve 64 MB of addresses.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_CHILD = "chairlift.engine.workers.child"


class WorkerProcess:
    """A process that does one job at a time; it is started for the first, and after it was ended.

    Not thread-safe, but for ``kill``.

    Args:
        modules: it imports these before its first job.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> bool:
        """Starts the process, if there is none; whether there was none.

        Raises:
            WorkerFailed: it does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self._end()  # something else has ended it
        if self._process is not None:
            return False
        with self._lock:
            if self._closed:
                raise WorkerFailed("the workers are closed")
            # NOTE: a session of its own keeps the terminal's Ctrl-C from it; it ends with its
            # input.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(os.getpid()), *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=ENVIRONMENT | os.environ,
            )
        try:
            self._receive(self._process, LOAD_SECONDS)
        except (TimeoutError, EOFError):
            self._end()
            raise WorkerFailed("a worker process does not start") from None
        return True

    def run(self, job: Job) -> Any:
        """What the job returns.

        Raises:
            TooExpensive: it exceeded a limit, and its process was ended.
            WorkerFailed: the process does not start, or the job has a bug.
            ChairliftError: whatever the job raises.
        """
        self.start()
        fixture = job.fixture
        if fixture is not None and fixture.key not in self._loaded:
            function, args = fixture.make()
            try:
                self._ask(Load(fixture.key, function, args), LOAD_SECONDS)
            except TooExpensive:
                raise WorkerFailed("a worker process does not load its fixture") from None
            self._loaded.add(fixture.key)
        key = None if fixture is None else fixture.key
        return self._ask(Run(job.function, job.args, job.cpu_seconds, key), job.cpu_seconds)

    def kill(self) -> None:
        """Ends the process for good, whatever it does; from any thread. ``close`` must follow."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Takes back what the process had."""
        self.kill()
        if self._process is not None:
            self._end()

    def _ask(self, message: Load | Run, seconds: float) -> Any:
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
            raise TooExpensive(f"takes longer than {seconds:g} s") from None
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
        """
        Raises:
            TimeoutError: there is no answer in time.
            EOFError: the process has ended.
        """
        assert process.stdout is not None
        # NOTE: select() itself takes no file number above 1023.
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
        """Ends the process; its exit code, the negative number of a signal."""
        process, self._process = self._process, None
        self._loaded.clear()
        assert process is not None
        # What has ended by itself keeps its own exit code.
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode
