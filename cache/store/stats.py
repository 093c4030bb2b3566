"""Counters of a prefix store."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class StoreStats:
    """Files and bytes since the start.

    ``dropped`` files did not fit the queue, ``failed`` could not be written, ``evicted`` were
    removed for lack of room, ``broken`` were corrupt and removed. ``read_seconds`` is the time
    spent reading.
    """

    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    evicted: int = 0
    broken: int = 0
    read: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0

    def since(self, before: StoreStats) -> StoreStats:
        """The difference from earlier counters."""
        names = [field.name for field in fields(self)]
        return StoreStats(*(getattr(self, name) - getattr(before, name) for name in names))
