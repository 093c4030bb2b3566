"""What a prefix store counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class StoreStats:
    """Files and bytes since the start.

    ``dropped`` did not fit the queue, ``failed`` could not be written, ``evicted`` went for lack of
    room, ``broken`` were corrupt and are gone. ``read_seconds`` is what the reads took.
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
        """What has come to be counted since then."""
        names = [field.name for field in fields(self)]
        return StoreStats(*(getattr(self, name) - getattr(before, name) for name in names))
