"""A rank's end of the pipes to rank 0."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import traceback
from typing import Any

import msgspec

from chairlift.engine.config import decode_path
from chairlift.engine.errors import ChairliftError
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.parallel.followers import (
    Failed,
    FromRank,
    Proceed,
    Report,
    StartRank,
    ToRank,
)
from chairlift.engine.workers.lifeline import follow_parent
from chairlift.engine.workers.wire import receive, send

log = logging.getLogger(__name__)


class RankPipe:
    """Standard input and output of this process, which is a rank that rank 0 has started.

    Messages are received on a thread, which ends the process when the input is closed. Whatever
    else is printed goes to standard error.

    Args:
        parent: rank 0's process id; None: it runs on another host.

    Raises:
        OSError: the kernel refuses to end this process with its parent.
    """

    def __init__(self, parent: int | None) -> None:
        if parent is not None:
            follow_parent(parent)
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._input = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._messages: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="chairlift-rank-0", daemon=True).start()

    def start(self) -> StartRank:
        """Waits for the first message."""
        message = self.take()
        assert isinstance(message, StartRank)
        return message

    def take(self) -> ToRank:
        """Waits for the next message."""
        return self._messages.get()

    def answer(self, message: FromRank) -> None:
        """Sends a message to rank 0."""
        send(self._output, self._encoder.encode(message))

    def meet(self, report: Report) -> list[list[int]]:
        """See ``Followers.meet``; ends the process if rank 0 does not proceed."""
        self.answer(report)
        message = self.take()
        if not isinstance(message, Proceed):
            sys.exit(0)
        return message.numbers

    def fail(self, error: Exception) -> None:
        """Tells rank 0 why this rank ends. The text of an unknown error may quote a user."""
        known = isinstance(error, ChairliftError)
        if not known:
            log.error("this rank has failed: %s", redacted_traceback(error))
        self.answer(Failed(str(error) if known else type(error).__name__))

    def _listen(self) -> None:
        try:
            decoder: Any = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_path)
            while (data := receive(self._input)) is not None:
                self._messages.put(decoder.decode(data))
        except Exception:  # of any type: without rank 0's messages there is nothing to do
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
