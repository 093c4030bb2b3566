"""Rank 0's side of the other ranks' processes: starts them, sends them turns, ends with them.

A rank's standard input is its lifeline and carries the messages to it; its standard output carries
its answers. So nothing has to be found, and nothing stays behind: a rank ends when the pipe closes,
that is, when rank 0 has ended for any reason. When a rank ends, rank 0 ends at once, because a step
would wait forever for that rank's part; the server then starts all of them again. If SIGKILL has
ended the rank, it ends rank 0 as well: the server then knows that no request has to be at fault.
"""

from __future__ import annotations

import logging
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

import msgspec

from chairlift.engine.config import EngineConfig, encode_path
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat
from chairlift.engine.parallel.journal import Turn
from chairlift.engine.parallel.place import RankPlace
from chairlift.engine.workers.wire import receive, send

log = logging.getLogger(__name__)

# Whatever keeps one rank from starting usually keeps all: rank 0 gets this long to explain it.
START_GRACE = 1.0
# Time for the last lines of the log, and for the last message to the server.
LAST_SECONDS = 0.2
STOP_SECONDS = 5.0
MAIN = ("chairlift.engine.process.rank_process",)


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """The first message to a rank: its place, the model to serve, and the settings."""

    place: RankPlace
    config: EngineConfig
    source: ModelSource
    log_level: str = "info"
    log_format: LogFormat = "text"


class Proceed(msgspec.Struct, tag=True, frozen=True):
    """All ranks have reported these numbers: continue."""

    numbers: list[list[int]]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Asks a rank to end."""


class Report(msgspec.Struct, tag=True, frozen=True):
    """A rank has come to the next point at which all wait.

    Attributes:
        device: the kind of its device.
        numbers: for the other ranks.
    """

    device: str
    numbers: list[int] = []


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A rank cannot continue; it ends. ``message`` is one line."""

    message: str


ToRank = StartRank | Proceed | Turn | Stop
FromRank = Report | Failed


class Followers:
    """The processes of the ranks 1, 2, …

    Call it on the thread that lives as long as the process: on Linux a rank ends with the thread
    that has started it (``workers.lifeline``).

    Args:
        starts: their first messages, in the order of their ranks.
        on_failed: called from another thread with the explanation of a rank that cannot start,
            before this process ends.
        main: the ranks' main module and the arguments that follow rank 0's process id.

    Raises:
        ModelError: a process cannot be started.
    """

    def __init__(
        self,
        starts: Sequence[StartRank],
        on_failed: Callable[[str], None] = lambda why: None,
        main: Sequence[str] = MAIN,
    ) -> None:
        self._on_failed = on_failed
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_path)
        self._reports: queue.SimpleQueue[tuple[int, Report | str]] = queue.SimpleQueue()
        self._serving = self._ending = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._inputs: list[IO[bytes]] = []
        for start in starts:
            try:
                process = subprocess.Popen(
                    command(start.place, main), stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            except OSError as error:
                rank = start.place.rank
                raise ModelError(
                    f"the process of rank {rank} cannot be started: {error}"
                ) from error
            assert process.stdin is not None
            self._processes.append(process)
            self._inputs.append(process.stdin)
            name = f"chairlift-rank-{start.place.rank}"
            threading.Thread(
                target=self._listen, args=(start.place.rank, process), name=name, daemon=True
            ).start()
        for start, stream in zip(starts, self._inputs, strict=True):
            _send(stream, self._encoder.encode(start))

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def meet(self, mine: Report) -> list[list[int]]:
        """Waits until all ranks have come to the same point as this one, then lets them continue.

        Args:
            mine: this rank's report; all ranks need the same kind of device.

        Returns:
            The numbers that each rank has reported.

        Raises:
            ModelError: a rank has failed, has ended with an exit code, or computes on another kind
                of device. If a signal has ended a rank, this process ends as well.
        """
        numbers = self.gather(mine)
        self.send(Proceed(numbers))
        return numbers

    def gather(self, mine: Report) -> list[list[int]]:
        """Collects the ranks' reports, without letting the ranks continue."""
        numbers = {0: mine.numbers}
        for _ in self._processes:
            rank, report = self._reports.get()
            if isinstance(report, str):
                raise ModelError(f"rank {rank}: {report}")
            if report.device != mine.device:
                raise ModelError(
                    f"rank {rank} computes on {report.device} and rank 0 on {mine.device}: each "
                    f"rank needs a device of the same kind"
                )
            numbers[rank] = report.numbers
        return [numbers[rank] for rank in sorted(numbers)]

    def serve(self) -> None:
        """Marks the start as done: from now on the process ends as soon as a rank ends."""
        self._serving = True

    def send(self, message: Proceed | Turn | Stop) -> None:
        """Sends a message to all ranks."""
        data = self._encoder.encode(message)
        for stream in self._inputs:
            _send(stream, data)

    def end_if_lost(self) -> None:
        """Call it before rank 0 reports a failure: it does not return if a signal has ended a rank.

        That rank is the cause then, and its listener ends this process.
        """
        time.sleep(LAST_SECONDS)  # a connection is closed shortly before its process has ended
        if self._lost:
            threading.Event().wait()

    def close(self) -> None:
        """Ends the processes."""
        self._ending = True
        self.send(Stop())
        for process, stream in zip(self._processes, self._inputs, strict=True):
            with suppress(OSError):
                stream.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()

    @property
    def _lost(self) -> bool:
        """Whether a signal has ended a rank: whatever sent it may spare the next one."""
        return any((process.poll() or 0) < 0 for process in self._processes)

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Receives a rank's messages until it ends."""
        assert process.stdout is not None
        decoder = msgspec.msgpack.Decoder(FromRank)
        failure: str | None = None
        try:
            while (data := receive(process.stdout)) is not None:
                message = decoder.decode(data)
                match message:
                    case Report():
                        self._reports.put((rank, message))
                    case Failed():
                        failure = message.message
                        break
        except (msgspec.DecodeError, MemoryError, OverflowError):
            failure = "something else prints to its standard output, such as a shell's start files"
        code = 1 if failure is not None else process.wait()
        cause = failure or f"its process {_cause(code)}"
        if code >= 0:
            self._reports.put((rank, cause))
        if not self._serving:
            time.sleep(START_GRACE)
        if self._ending:
            return
        log.error("rank %d: %s; the engine ends", rank, cause)
        if not self._serving and not self._lost:
            self._on_failed(f"rank {rank}: {cause}")
        time.sleep(LAST_SECONDS)
        if any(each.poll() == -signal.SIGKILL for each in self._processes):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


def command(place: RankPlace, main: Sequence[str] = MAIN) -> list[str]:
    """The command that starts a rank's process, on its host."""
    module, *arguments = main
    local = [sys.executable, "-m", module]
    if place.host is None:
        return [*local, str(os.getpid()), *arguments]
    remote = " ".join(map(shlex.quote, [*local, *arguments]))
    return ["ssh", "-o", "BatchMode=yes", place.host, remote]


def _cause(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _send(stream: IO[bytes], data: bytes) -> None:
    with suppress(OSError, ValueError):  # it has ended, which its listener notices
        send(stream, data)
