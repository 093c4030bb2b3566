"""The thread that reads files of a prefix store for waiting requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread

from chairlift.cache.saved.nodes import SavedNode
from chairlift.cache.snapshot import Snapshot
from chairlift.cache.store.files import NodeFiles
from chairlift.cache.store.index import FileSegment
from chairlift.cache.store.stats import StoreStats

_log = logging.getLogger(__name__)


class StoreLoad:
    """A request to read segments from files, up to the first that is missing or corrupt.

    Once it has ``ended``, ``nbytes`` and ``seconds`` are the bytes read and the time it took.
    """

    def __init__(self, segments: Sequence[FileSegment]) -> None:
        self.segments = segments
        self.nodes: list[SavedNode] = []
        self.nbytes = 0
        self.seconds = 0.0
        self.cancelled = False
        self.ended = Event()

    def cancel(self) -> None:
        """Skips all segments that are not read yet."""
        self.cancelled = True

    def snapshots(self) -> list[Snapshot]:
        """The snapshots read, each to be inserted for the tokens up to its ``stop``; uses MLX."""
        assert self.ended.is_set(), "it is still being read"
        pairs = zip(self.nodes, self.segments, strict=False)
        return [node.snapshot().part(node.head.start, segment.stop) for node, segment in pairs]


class StoreReader:
    """Executes loads one after the other.

    Args:
        files: the files to read from.
        stats: the counters to update.
        on_change: called from the thread when a load has ended.
    """

    def __init__(self, files: NodeFiles, stats: StoreStats, on_change: Callable[[], None]) -> None:
        self._files = files
        self._stats = stats
        self._on_change = on_change
        self._loads: SimpleQueue[StoreLoad | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="prefix-reader", daemon=True)
        self._thread.start()

    def put(self, load: StoreLoad) -> None:
        """Queues a load."""
        self._loads.put(load)

    def close(self) -> None:
        """Ends the thread after the queued loads, without waiting for it."""
        self._loads.put(None)

    def _run(self) -> None:
        while (load := self._loads.get()) is not None:
            began = time.perf_counter()
            try:
                self._read(load)
            except Exception as error:  # any error counts as a miss; other loads may wait
                _log.warning("prefixes could not be read: %s", error)
            load.seconds = time.perf_counter() - began
            self._stats.read += len(load.nodes)
            self._stats.read_bytes += load.nbytes
            self._stats.read_seconds += load.seconds
            load.ended.set()
            self._on_change()
            del load

    def _read(self, load: StoreLoad) -> None:
        for entry, _ in load.segments:
            node = None if load.cancelled else self._files.read(entry)
            if node is None:
                return
            load.nodes.append(node)
            load.nbytes += entry.nbytes
