"""Runs a server as a child process, waits until it is healthy, and always ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from chairlift.loadtest.bench.flags import KEY_VARIABLES
from chairlift.loadtest.errors import ServerError

_POLL_PERIOD = 0.2
_SHOW_PERIOD = 30.0
_TERMINATE_SECONDS = 15.0
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Describes how to start a server on the loopback interface, and how to use it.

    Attributes:
        name: its name in reports.
        command: the command that starts it.
        port: its port.
        model: the model's name in requests; None: the first one that the server lists.
        body: fields for every request, which make replies run to full length.
        env: additional environment variables. API keys are not inherited.
        notes: remarks for the report.
        min_tokens: whether the server supports this field.
    """

    name: str
    command: list[str]
    port: int
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    min_tokens: bool = False

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that a ``ChildServer`` is ended on the way out.

    A command that runs one calls this first. In another than the main thread it does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


class ChildServer:
    """Runs a server for the duration of a ``with``.

    Entering waits at most ``start_limit`` seconds until GET /health replies 200. Leaving always
    ends the process and its children. The log is kept after an error. See ``exit_on_sigterm``.

    Raises:
        ServerError: the server ended or was not ready in time; the end of its log is printed.
    """

    def __init__(self, spec: ServerSpec, start_limit: float) -> None:
        self.spec = spec
        self._start_limit = start_limit
        self._process: subprocess.Popen[bytes] | None = None
        handle, path = tempfile.mkstemp(prefix=f"chairlift-{spec.name}-", suffix=".log")
        os.close(handle)
        self._log = Path(path)

    @property
    def started(self) -> bool:
        """Whether the process has been started and not ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        print(f"{self.spec.name}: starting (log: {self._log})", file=sys.stderr, flush=True)
        with self._log.open("wb") as log:
            try:
                # NOTE: a new session is also a new process group, so that killing the group reaches
                # the server's children and no other process.
                self._process = subprocess.Popen(
                    self.spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **dict.fromkeys(KEY_VARIABLES, ""), **self.spec.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"{self.spec.name} cannot be started: {error}") from error
        try:
            self._await_health(self._process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        if error is None:
            self._log.unlink(missing_ok=True)

    @property
    def log_tail(self) -> str:
        """The end of the server's log."""
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits until the process ends by itself; returns its exit code, or None if it did not."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _await_health(self, process: subprocess.Popen[bytes]) -> None:
        started = shown = time.monotonic()
        while not self._healthy():
            now = time.monotonic()
            if process.poll() is not None:
                self._print_log_tail()
                raise ServerError(f"{self.spec.name} ended with code {process.returncode}")
            if now - started > self._start_limit:
                self._print_log_tail()
                raise ServerError(f"{self.spec.name} was not ready in {self._start_limit:.0f} s")
            if now - shown > _SHOW_PERIOD:
                shown = now
                waited = f"{now - started:.0f} s"
                print(f"{self.spec.name}: not ready after {waited}", file=sys.stderr, flush=True)
            time.sleep(_POLL_PERIOD)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.spec.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _print_log_tail(self) -> None:
        print(f"--- end of {self._log} ---\n{self.log_tail}", file=sys.stderr)

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_SECONDS)
        # Kill processes of the group that ignored SIGTERM or lost their parent.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
