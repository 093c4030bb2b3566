"""The write queue of a prefix store, and the thread that empties it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import NamedTuple

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.saved.layers import SavedLayer
from chairlift.cache.store.files import NodeFiles
from chairlift.cache.store.stats import StoreStats

_log = logging.getLogger(__name__)
# How long nothing is written after the disk has refused something.
PAUSE_SECONDS = 60.0


class WriteJob(NamedTuple):
    """A node to write.

    Attributes:
        tokens: the node's tokens.
        before: digest of the path before them.
        start: the position of the first of them.
        layers: the result of ``pack``.
        nbytes: the memory that the job takes while it waits.
    """

    tokens: Sequence[int]
    before: PathDigest
    start: int
    layers: tuple[SavedLayer, ...]
    nbytes: int


class StoreWriter:
    """Writes nodes one after the other on its own thread; called from one other thread.

    Args:
        files: the files to write to.
        queue_bytes: maximum bytes that may wait to be written.
        stats: the counters to update.
        on_change: called from the thread when a job is done.
    """

    def __init__(
        self,
        files: NodeFiles,
        queue_bytes: int,
        stats: StoreStats,
        on_change: Callable[[], None],
    ) -> None:
        self.queued_bytes = 0
        self._files = files
        self._max_bytes = queue_bytes
        self._stats = stats
        self._on_change = on_change
        self._queue: deque[WriteJob] = deque()
        self._busy = self._closed = self._full_was_logged = False
        # The time, of time.monotonic, before which nothing is written.
        self._paused_until = 0.0
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="prefix-writer", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """The jobs that are not done."""
        with self._changed:
            return len(self._queue) + self._busy

    def can_put(self, nbytes: int, deadline: float | None) -> bool:
        """Whether the queue has room for a job now, or by ``deadline`` (of ``time.monotonic``).

        If not, or if writing has just failed, the job counts as dropped.
        """
        if self._is_paused:
            self._stats.dropped += 1
            return False
        timeout = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            free = self._changed.wait_for(lambda: self._closed or self._has_room(nbytes), timeout)
            if free and not self._closed:
                return True
        self._stats.dropped += 1
        if not self._full_was_logged:
            self._full_was_logged = True
            _log.warning(
                "prefixes come faster than %s takes them: %d bytes dropped, as others will be",
                self._files.directory,
                nbytes,
            )
        return False

    def put(self, job: WriteJob) -> None:
        """Queues a job; see ``can_put``."""
        with self._changed:
            self._queue.append(job)
            self.queued_bytes += job.nbytes
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Counts a node that could not be written, and logs the first."""
        self._stats.failed += 1
        refused = isinstance(error, OSError)
        if self._stats.failed == 1:
            next_try = f"; the next try is in {PAUSE_SECONDS:.0f} s" if refused else ""
            _log.warning(
                "a prefix was not saved in %s: %s%s", self._files.directory, error, next_try
            )
        if refused:
            self._paused_until = time.monotonic() + PAUSE_SECONDS

    def flush(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds until the queue is written; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float) -> bool:
        """Flushes and ends the thread; returns whether everything was written."""
        done = self.flush(timeout)
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(max(0.1, timeout) if done else 0.1)
        return done

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _has_room(self, nbytes: int) -> bool:
        return not self.queued_bytes or self.queued_bytes + nbytes <= self._max_bytes

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if self._is_paused:
                self._stats.dropped += 1
            else:
                self._write(job)
            with self._changed:
                self._busy = False
                self.queued_bytes -= job.nbytes
                del job
                self._changed.notify_all()
            self._on_change()

    def _write(self, job: WriteJob) -> None:
        try:
            self._files.refresh()
            self._files.write(job.tokens, job.before, job.start, job.layers)
        except Exception as error:  # a full disk must not end the thread
            self.fail(error)

    def _next(self) -> WriteJob | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            self._busy = bool(self._queue)
            return self._queue.popleft() if self._queue else None
