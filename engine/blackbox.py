"""Whom an engine process computes just now, in a file: if it dies, its parent reads there who was
being computed, however it died.

A message might still lie in the dying process; what is written to a file is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from chairlift.scheduler.sequence import Sequence

_NAME = "computing"


class BlackBox:
    """Written by the engine, in a ``folder`` of its own, before it computes anything."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / _NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._noted: list[Sequence] = []
        self._encoder = msgspec.json.Encoder()

    def note(self, sequences: list[Sequence]) -> None:
        """These are computed from now on. Nothing is written while they stay the same."""
        if sequences == self._noted:
            return
        now = time.monotonic()
        begun = {s.request_id: s.scheduled_at or now for s in sequences}
        # One line: what is behind it is left of a longer one.
        os.pwrite(self._file, self._encoder.encode(begun) + b"\n", 0)
        self._noted = sequences


def computing(folder: Path) -> dict[str, float]:
    """Ids of the requests that an engine was computing when it ended, and when each was begun, in
    seconds of ``time.monotonic()``; none if it had not come to that.
    """
    try:
        line, _, _ = (folder / _NAME).read_bytes().partition(b"\n")
        return msgspec.json.decode(line, type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return {}
