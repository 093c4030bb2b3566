"""A directory of what the prefix cache has dropped: it survives a restart, within a budget.

One thread writes and one reads; what they are given is memory, and they know no MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from chairlift.cache.path_digest import int32, salt_digest
from chairlift.cache.prefix.match import Evicted
from chairlift.cache.saved.layers import Template, pack
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import LayerKind
from chairlift.cache.store.files import NodeFiles
from chairlift.cache.store.index import Segment
from chairlift.cache.store.reader import Load, Reader
from chairlift.cache.store.stats import StoreStats
from chairlift.cache.store.writer import Job, Writer

# Of a token's id on an edge.
_TOKEN_BYTES = 8


class PrefixStore:
    """Nodes by the tokens that lead to them, in files. For one thread, beside its own.

    Args:
        directory: made if need be, for the owner's eyes only. Other files in it are left alone.
        budget_bytes: the files of this model take no more; what was used least recently goes.
        model: the fingerprint. Files of others are neither read nor counted.
        kinds: what each layer keeps.
        template: what the layers must look like. Better than none: see ``template_of``.
        queue_bytes: how much may wait to be written.

    Raises:
        OSError: the directory cannot be made or read.
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
        # Called, from threads of the store, when a node is written or a load has ended.
        self.on_change: Callable[[], None] = lambda: None
        self._kinds = tuple(kinds)
        self._files = NodeFiles(directory, budget_bytes, model, template, self.stats)
        self._writer = Writer(self._files, queue_bytes, self.stats, self._notify)
        self._reader = Reader(self._files, self.stats, self._notify)

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

    def put(self, node: Evicted) -> bool:
        """Hands a node to the thread and returns at once, after evaluating it if it was not.

        Returns:
            Whether it was taken; if the queue is full it is not, which is counted.
        """
        return self._put(node, deadline=None)

    def save_all(self, nodes: Iterable[Evicted], timeout: float) -> int:
        """Persists nodes at shutdown, waiting for room in the queue; ``timeout`` is in seconds.

        Returns:
            How many were taken; all of these are written if ``flush`` says so afterwards.
        """
        deadline = time.monotonic() + timeout
        taken = sum(self._put(node, deadline) for node in nodes)
        self.flush(deadline - time.monotonic())
        return taken

    def flush(self, timeout: float) -> bool:
        """Waits until all that was taken is written, at most so many seconds; whether it is."""
        return self._writer.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Flushes and ends the threads; whether all was written. Nothing is taken afterwards."""
        self._reader.close()
        return self._writer.close(timeout)

    def find(self, tokens: Sequence[int], position: int, salt: str = "") -> list[Segment]:
        """What extends ``tokens[:position]``, which memory has: segments that reach ever further.

        Each starts no later than the one before it stops. A segment that cannot be cut is only
        found whole. ``tokens`` should be without those that are not to be taken from a cache.
        """
        found = self._files.index.on_path(salt_digest(salt), int32(tokens))
        chain: list[Segment] = []
        while True:
            near = [s for s in found if s.entry.head.start <= position < s.stop]
            if not near:
                return chain
            chain.append(max(near, key=lambda segment: segment.stop))
            position = chain[-1].stop

    def load(self, segments: Sequence[Segment]) -> Load:
        """Begins to read the segments of ``find``, behind what is being read already."""
        load = Load(segments)
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
        self._writer.put(Job(node.edge, node.before, node.start, layers, size))
        return True

    def _notify(self) -> None:
        self.on_change()
