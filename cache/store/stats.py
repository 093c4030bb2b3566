"""Counters of a prefix store."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class StoreStats:
    """Files and bytes since the start.

    Attributes:
        written: files written.
        written_bytes: bytes written.
        dropped: files that did not fit the write queue, or came just after a failed one.
        failed: files that could not be written.
        evicted: files removed for lack of room.
        broken: corrupt files, which were removed.
        read: files read.
        read_bytes: bytes read.
        read_seconds: time spent reading.
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
