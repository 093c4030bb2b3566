"""Stores nodes evicted from the prefix cache in a directory, so that they survive a restart.

One thread writes and one reads; both handle plain memory and never use MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from chairlift.cache.path_digest import int32, salt_digest
from chairlift.cache.prefix.match import Evicted
from chairlift.cache.saved.layers import Template, pack
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import LayerKind
from chairlift.cache.store.files import NodeFiles
from chairlift.cache.store.index import FileSegment
from chairlift.cache.store.reader import StoreLoad, StoreReader
from chairlift.cache.store.stats import StoreStats
from chairlift.cache.store.writer import StoreWriter, WriteJob

# Bytes of a token id on an edge.
_TOKEN_BYTES = 8


class PrefixStore:
    """Nodes by token prefix, in files. Not thread-safe; it has threads of its own.

    Args:
        directory: created if necessary, readable by its owner only. Other files are left alone.
        budget_bytes: maximum bytes of this model's files; the least recently used are removed.
        model: the fingerprint. Other models' files are neither read nor counted.
        kinds: each layer's kind.
        template: the required types and shapes of the layers, from ``template_of``; None checks
            less.
        queue_bytes: maximum bytes that may wait to be written.

    Raises:
        OSError: the directory cannot be created or read.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        model: str,
        kinds: Sequence[LayerKind],
        template: Template | None = None,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self.stats = StoreStats()
        # Called from the store's threads when a node is written or a load has ended.
        self.on_change: Callable[[], None] = lambda: None
        self._kinds = tuple(kinds)
        self._files = NodeFiles(directory, budget_bytes, model, template, self.stats)
        self._writer = StoreWriter(self._files, queue_bytes, self.stats, self._notify)
        self._reader = StoreReader(self._files, self.stats, self._notify)

    def __len__(self) -> int:
        return len(self._files.index)

    @property
    def nbytes(self) -> int:
        """Bytes of this model's files."""
        return self._files.index.nbytes

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._writer.queued_bytes

    @property
    def _lost(self) -> int:
        """Nodes that were not written, and will not be."""
        return self.stats.dropped + self.stats.failed

    def put(self, node: Evicted) -> bool:
        """Queues a node for writing, evaluating it first if necessary; does not wait otherwise.

        Returns:
            Whether it was queued; if the queue is full, the node is dropped and counted.
        """
        return self._put(node, deadline=None)

    def save_all(self, nodes: Sequence[Evicted], timeout: float) -> int:
        """Writes nodes at shutdown, waiting for room in the queue; ``timeout`` is in seconds.

        Returns:
            The number of these nodes that are on disk.
        """
        deadline = time.monotonic() + timeout
        self.flush(timeout)  # only failures of these nodes count
        lost = self._lost
        for node in nodes:
            self._put(node, deadline)
        self.flush(deadline - time.monotonic())
        return len(nodes) - (self._lost - lost) - self._writer.queued

    def flush(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds until the queue is written; returns whether it is."""
        return self._writer.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Flushes and ends the threads for good; returns whether everything was written."""
        self._reader.close()
        return self._writer.close(timeout)

    def find(self, tokens: Sequence[int], position: int, salt: str = "") -> list[FileSegment]:
        """A chain of segments that extends ``tokens[:position]``, the part already in memory.

        Each segment starts no later than the previous one stops, and reaches further. A segment
        that cannot be cut is used only if it matches completely. ``tokens`` should not include
        tokens that must not come from a cache.
        """
        found = self._files.index.on_path(salt_digest(salt), int32(tokens))
        chain: list[FileSegment] = []
        while True:
            near = [s for s in found if s.entry.head.start <= position < s.stop]
            if not near:
                return chain
            chain.append(max(near, key=lambda segment: segment.stop))
            position = chain[-1].stop

    def load(self, segments: Sequence[FileSegment]) -> StoreLoad:
        """Queues the segments of ``find`` for reading."""
        load = StoreLoad(segments)
        self._reader.put(load)
        return load

    def _put(self, node: Evicted, deadline: float | None) -> bool:
        size = node.snapshot.nbytes + _TOKEN_BYTES * len(node.edge)
        if not self._writer.can_put(size, deadline):
            return False
        try:
            layers = pack(self._kinds, node.snapshot)
        except SavedStateError as error:
            self._writer.fail(error)
            return False
        self._writer.put(WriteJob(node.edge, node.before, node.start, layers, size))
        return True

    def _notify(self) -> None:
        self.on_change()
