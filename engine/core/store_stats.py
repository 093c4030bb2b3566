"""What the prefix store counts, told by the stats of the steps."""

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
    """Tells each step's stats what is new since the step before."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        # What was found at the start is told by the first step, and wakes nobody.
        self._told = StoreStats()
        self._seen = self._state()

    @property
    def due(self) -> bool:
        """Whether something has changed that no step has told."""
        return self._state() != self._seen

    def tell(self, stats: StepStats) -> None:
        """Sets the fields of ``stats`` that are about the store."""
        self._seen = now = self._state()
        new, self._told = now.counts.since(self._told), now.counts
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
