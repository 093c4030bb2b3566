"""The engine's prefix cache: sequences look up prefixes, start from them, and add new ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile

import mlx.core as mx

from chairlift.cache.kinds import Cache
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
        kinds: the kind of each layer's cache.
        budget: maximum bytes in memory; 0 turns the prefix cache off.
        store: gets the prefixes that memory evicts; with None, these are lost.
        prompts_only: keep the tokens of prompts only. The state after a reply's tokens depends on
            the end of its prompt.
    """

    def __init__(
        self,
        kinds: Seq[LayerKind],
        budget: int,
        store: PrefixStore | None,
        prompts_only: bool = False,
    ) -> None:
        self._tree = PrefixTree(kinds, budget, None if store is None else self._dropped)
        self._has_windows = any(kind.window is not None for kind in kinds)
        self._store = store
        self._prompts_only = prompts_only
        # The number of evictions that the stats have reported.
        self._evictions = 0
        self._on_store = None if store is None else StoreReport(store)
        # The requests that wait for the disk, in order; the first one's load is running. Loads run
        # one at a time, because the later requests often need the same prefix and then find it in
        # memory.
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
        """Whether a load has ended, or the store's stats have changed."""
        arrived = self._load is not None and self._load.ended.is_set()
        return arrived or (self._on_store is not None and self._on_store.due)

    def on_due(self, wake: Callable[[], None]) -> None:
        """Registers ``wake``, which other threads call whenever this may have become ``due``."""
        if self._store is not None:
            self._store.on_change = wake

    def fetch(self, sequence: Sequence) -> None:
        """Starts to read from disk, if the disk has a longer prefix of a sequence than memory.

        The sequence is ``is_awaited`` until ``collect`` has moved that prefix to memory, or until
        it turns out to be gone or broken.
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
        """Adds loaded prefixes to memory, and starts the next load."""
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
            self._start_next_load()
        return NOTHING_NEW

    def drop(self, sequence: Sequence, last: bool) -> None:
        """Cancels the load of a request whose last choice has ended."""
        if not last:
            return
        request_id = sequence.request_id
        if self._load is not None and request_id == next(iter(self._fetching)):
            self._load.cancel()
            self._load = None
        self._fetching.pop(request_id, None)
        self._start_next_load()

    def _start_next_load(self) -> None:
        """Starts the next load; skips requests whose prefix has come into memory since."""
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
        """Sets the prefix cache's fields of a step's stats."""
        stats.prefix_bytes = self.nbytes
        stats.prefix_evictions = self._tree.evictions - self._evictions
        self._evictions = self._tree.evictions
        if self._on_store is not None:
            self._on_store.report(stats)

    def cached(self, sequence: Sequence) -> int:
        """The number of a sequence's first tokens that are cached; its last token never counts.

        Also sets the sequence's ``shared``, the tokens that it shares with others, usable or not,
        its ``pages``, ``copies_page``, and ``match``, which caches this answer until the tree
        changes.
        """
        version, length = sequence.match
        if version != self._tree.version:
            match = self._tree.match(sequence.ids, len(sequence.tokens) - 1, sequence.cache_salt)
            sequence.shared, length = match.known, match.length
            sequence.match = self._tree.version, length
            sequence.pages, sequence.copies_page = match.full_pages(), match.copies_page()
        return length

    @property
    def version(self) -> int:
        """Increases whenever ``continuation`` may give more."""
        return self._tree.version

    def continuation(self, sequence: Sequence, count: int) -> list[int]:
        """At most ``count`` tokens that followed all of a sequence's tokens in an earlier one."""
        if sequence.bypasses_prefix_cache:
            return []
        tokens = self._tree.continuation(sequence.ids, count, sequence.cache_salt)
        # An image may follow, whose keys are negative numbers, not token ids.
        return list(takewhile(lambda token: token >= 0, tokens))

    def state(self, sequence: Sequence, length: int) -> Snapshot | None:
        """The state after a sequence's first ``length`` tokens; ``cached`` returned that number."""
        if not length:
            return None
        match = self._tree.match(sequence.ids, length, sequence.cache_salt)
        assert match.length == length, (match.length, length)
        return match.snapshot()

    def keep(self, sequence: Sequence, cache: Cache, row: int) -> None:
        """Adds a sequence's tokens to the tree, with their state in a row of ``cache``."""
        if sequence.replay or sequence.bypasses_prefix_cache or sequence.nonfinite:
            return  # it is the canary's, it must not be shared, or its state is broken
        # The row may lack the last token, if that was in flight when the sequence ended.
        count = cache.offsets[row]
        if self._prompts_only:
            count = min(count, sequence.prompt_tokens)
        tokens = sequence.ids[:count]
        # With windows, the tree may contain tokens without the state at this position.
        known = 0
        if not self._has_windows:
            known = self._tree.match(tokens, salt=sequence.cache_salt).known
        snapshot = cache.extract(row, known).part(known, len(tokens))
        self._tree.insert(tokens, snapshot, sequence.cache_salt)

    def drop_one(self) -> bool:
        """Drops the least recently used prefix; returns whether there was one."""
        return self._tree.evict(1) > 0

    def take_pending(self) -> list[mx.array]:
        """Returns pending copies, to be evaluated before the copied buffers change."""
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
