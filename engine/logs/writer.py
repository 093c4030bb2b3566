"""Writes log lines to standard error without ever blocking the caller.

A pipe whose reader has stopped, a closed terminal or a full disk must not stop the server.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
from collections import deque
from threading import Condition, Thread

logger = logging.getLogger(__name__)

# Characters that may wait for a slow reader; an access line has about 300.
MAX_CHARS = 4 << 20
# Time that the process waits at its end for unwritten lines.
END_SECONDS = 2.0


class LogWriter:
    """Queues text for a file descriptor and writes it on a thread. Thread-safe.

    While ``max_chars`` characters wait, new lines are dropped and counted; a line in the log
    reports their number once there is space. Lines that cannot be written (a full disk, a closed
    pipe) are dropped silently, because there is nowhere to report it.
    """

    def __init__(self, fd: int, max_chars: int = MAX_CHARS) -> None:
        self._fd = fd
        self._max_chars = max_chars
        self._lines: deque[str] = deque()
        self._chars = self._lost = 0
        self._busy = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.finish, END_SECONDS)

    def write(self, text: str) -> None:
        """Queues a line."""
        with self._changed:
            if self._lines and self._chars + len(text) > self._max_chars:
                self._lost += 1
                return
            self._lines.append(text)
            self._chars += len(text)
            self._changed.notify_all()

    def flush(self) -> None:
        """Does nothing; ``logging`` calls it."""

    def finish(self, seconds: float) -> bool:
        """Waits at most ``seconds`` until all lines are written; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._busy, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._lines))
                self._busy = True
                line = self._lines.popleft()
                self._chars -= len(line)
            self._put(line.encode("utf-8", "backslashreplace"))
            with self._changed:
                lost = self._lost if self._chars < self._max_chars // 2 else 0
                self._lost -= lost
            if lost:
                logger.warning("%d lines of the log were lost: it is read too slowly", lost)

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process has made this terminal non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(1000)
            except OSError:
                return
