"""Reports the prefix store's counts in the stats of the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from chairlift.cache.store.stats import StoreStats
from chairlift.cache.store.store import PrefixStore
from chairlift.engine.messages import StepStats


class _State(NamedTuple):
    counts: StoreStats
    disk: int
    queue: int


class StoreReport:
    """Adds the store's changes since the previous step to each step's stats."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        # The first step reports the files found at the start; they do not make the report ``due``.
        self._reported = StoreStats()
        self._last_state = self._state()

    @property
    def due(self) -> bool:
        """Whether something has changed since the last report."""
        return self._state() != self._last_state

    def report(self, stats: StepStats) -> None:
        """Sets the store's fields of ``stats``."""
        self._last_state = now = self._state()
        new, self._reported = now.counts.since(self._reported), now.counts
        stats.store_files = {
            "written": new.written,
            "read": new.read,
            "dropped": new.dropped,
            "failed": new.failed,
            "evicted": new.evicted,
            "broken": new.broken,
        }
        stats.store_io_bytes = {"written": new.written_bytes, "read": new.read_bytes}
        stats.store_read_seconds = new.read_seconds
        stats.store_bytes = {"disk": now.disk, "queue": now.queue}

    def _state(self) -> _State:
        store = self._store
        return _State(replace(store.stats), store.nbytes, store.queued_bytes)
