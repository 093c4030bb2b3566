"""A file with the requests that the engine is computing, which its parent reads after a crash.

A message could be lost when the process dies; a file is not.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from chairlift.scheduler.sequence import Sequence


class BlackBox:
    """The engine's side: records the requests of each step before the step is computed.

    Args:
        path: the file, which a ``BlackBoxReader`` has made.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY)
        self._noted: list[Sequence] = []
        self._encoder = msgspec.json.Encoder()

    def note(self, sequences: list[Sequence]) -> None:
        """Records the sequences computed from now on; writes only if they have changed."""
        if sequences == self._noted:
            return
        now = time.monotonic()
        scheduled = {s.request_id: s.scheduled_at or now for s in sequences}
        # The file is one line; anything after it is the rest of a longer, older line.
        line = self._encoder.encode(scheduled) + b"\n"
        try:
            complete = os.pwrite(self._file, line, 0) == len(line)
        except OSError:
            complete = False
        if complete:
            self._noted = sequences
        else:  # a full disk: reporting no request is better than a wrong one
            self._noted = []
            os.ftruncate(self._file, 0)


class BlackBoxReader:
    """The parent's side: makes the file, which may be removed once the engine has opened it.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)

    @property
    def computing(self) -> dict[str, float]:
        """The requests that the engine was computing when it ended; empty if it was idle.

        Maps request ids to the time at which each was scheduled, in seconds of
        ``time.monotonic()``.
        """
        line, _, _ = os.pread(self._file, os.fstat(self._file).st_size, 0).partition(b"\n")
        try:
            return msgspec.json.decode(line, type=dict[str, float])
        except msgspec.DecodeError:
            return {}

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
