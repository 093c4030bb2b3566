"""The prefix cache as the engine uses it: sequences look up, take and add prefixes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.prefix.match import Evicted
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.snapshot import LayerKind, Snapshot
from chairlift.cache.store.index import FileSegment
from chairlift.cache.store.reader import StoreLoad
from chairlift.cache.store.store import PrefixStore
from chairlift.engine.core.background import NOTHING_NEW, Collected
from chairlift.engine.core.store_stats import StoreReport
from chairlift.engine.messages import StepStats
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class PrefixCache:
    """Maps sequences, by their tokens and their tenant's salt, to the tree of snapshots.

    Args:
        kinds: what each layer caches.
        budget: maximum bytes in memory; 0 turns the prefix cache off.
        store: receives what memory has no room for; None: evicted prefixes are lost.
    """

    def __init__(self, kinds: Seq[LayerKind], budget: int, store: PrefixStore | None) -> None:
        self._tree = PrefixTree(kinds, budget, None if store is None else self._dropped)
        self._whole = all(kind.window is None for kind in kinds)
        self._store = store
        # Evictions that the stats have reported.
        self._evictions = 0
        self._on_store = None if store is None else StoreReport(store)
        # The requests that wait for the disk, in order; the first one's load is running. Loads run
        # one at a time, because the requests behind often want the same prefix and then find it
        # in memory.
        self._fetching: dict[str, Sequence] = {}
        self._load: StoreLoad | None = None
        self._closing: list[Evicted] | None = None

    @property
    def active(self) -> bool:
        """Whether the prefix cache is on."""
        return self._tree.budget > 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._tree.nbytes

    @property
    def due(self) -> bool:
        """Whether a load has arrived, or the store's stats have changed."""
        arrived = self._load is not None and self._load.ended.is_set()
        return arrived or (self._on_store is not None and self._on_store.due)

    def on_due(self, wake: Callable[[], None]) -> None:
        """Registers ``wake``, which other threads call whenever this may have become ``due``."""
        if self._store is not None:
            self._store.on_change = wake

    def fetch(self, sequence: Sequence) -> None:
        """Starts to read from disk a longer prefix than memory has, if there is one.

        The sequence is ``is_awaited`` until ``collect`` has put it there, or it proves to be
        gone or broken.
        """
        if sequence.bypasses_prefix_cache:
            return
        if segments := self._on_disk(sequence):
            self._fetching[sequence.request_id] = sequence
            if self._store is not None and self._load is None:
                self._load = self._store.load(segments)

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether a sequence's request waits for the disk."""
        return sequence.request_id in self._fetching

    def collect(self) -> Collected:
        """Puts into memory what has been read, and starts to read what is wanted next."""
        while self._load is not None and self._load.ended.is_set():
            load, self._load = self._load, None
            sequence = self._fetching.pop(next(iter(self._fetching)))
            for snapshot in load.snapshots():
                tokens = sequence.ids[: snapshot.stop]
                if not self._tree.insert(tokens, snapshot, sequence.cache_salt):
                    break
            if load.nbytes:
                log.info(
                    "read %d bytes of prefixes in %.2f s",
                    load.nbytes,
                    load.seconds,
                    extra={"completion_id": sequence.request_id},
                )
            self._read_on()
        return NOTHING_NEW

    def drop(self, sequence: Sequence, last: bool) -> None:
        """Stops reading for a request whose last choice has ended."""
        if not last:
            return
        request_id = sequence.request_id
        if self._load is not None and request_id == next(iter(self._fetching)):
            self._load.cancel()
            self._load = None
        self._fetching.pop(request_id, None)
        self._read_on()

    def _read_on(self) -> None:
        """Starts the next load. Skips requests whose prefix is in memory by now."""
        while self._store is not None and self._load is None and self._fetching:
            request_id, sequence = next(iter(self._fetching.items()))
            if segments := self._on_disk(sequence):
                self._load = self._store.load(segments)
            else:
                del self._fetching[request_id]

    def _on_disk(self, sequence: Sequence) -> list[FileSegment]:
        if self._store is None:
            return []
        tokens, salt = sequence.ids[:-1], sequence.cache_salt
        have = self._tree.match(tokens, salt=salt).length
        return self._store.find(tokens, have, salt)

    def report(self, stats: StepStats) -> None:
        """Adds evictions since the step before, and current sizes, to a step's stats."""
        stats.prefix_bytes = self.nbytes
        stats.prefix_evictions = self._tree.evictions - self._evictions
        self._evictions = self._tree.evictions
        if self._on_store is not None:
            self._on_store.report(stats)

    def cached(self, sequence: Sequence) -> int:
        """How many first tokens of a sequence are cached; its last token is always computed.

        Also notes on the sequence how many tokens it shares with others, usable or not; and this
        answer, which is valid until the tree changes.
        """
        version, length = sequence.match
        if version != self._tree.version:
            match = self._tree.match(sequence.ids, len(sequence.tokens) - 1, sequence.cache_salt)
            sequence.shared, length = match.known, match.length
            sequence.match = self._tree.version, length
        return length

    def state(self, sequence: Sequence, length: int) -> Snapshot | None:
        """The caches after a sequence's first ``length`` tokens, which ``cached`` promised."""
        if not length:
            return None
        match = self._tree.match(sequence.ids, length, sequence.cache_salt)
        assert match.length == length, (match.length, length)
        return match.snapshot()

    def keep(self, sequence: Sequence, cache: BatchCache, row: int) -> None:
        """Adds to the tree what is new in the caches of a sequence's row."""
        if sequence.replay or sequence.bypasses_prefix_cache or sequence.nonfinite:
            return  # not asked for again, not meant for the cache, or not fit for others
        # A token may have been in flight when the sequence was ended.
        tokens = sequence.ids[: cache.offsets[row]]
        # A window may lack older tokens at a position that the tree has.
        known = self._tree.match(tokens, salt=sequence.cache_salt).known if self._whole else 0
        snapshot = cache.extract(row, known).part(known, len(tokens))
        self._tree.insert(tokens, snapshot, sequence.cache_salt)

    def take_pending(self) -> list[mx.array]:
        """Copies that have to be evaluated before the buffers they are taken from change."""
        return self._tree.take_pending()

    def close(self, timeout: float) -> None:
        """Writes all prefixes in memory to disk, for at most ``timeout`` seconds."""
        if self._store is None:
            return
        if self._load is not None:
            self._load.cancel()
        mx.eval(self._tree.take_pending())
        self._closing = []
        self._tree.evict(self._tree.nbytes)
        saved = self._store.save_all(self._closing, timeout)
        log.info("saved %d of %d prefixes in memory", saved, len(self._closing))
        self._store.close(timeout)

    def _dropped(self, node: Evicted) -> None:
        if self._closing is not None:
            self._closing.append(node)
        elif self._store is not None:
            self._store.put(node)
