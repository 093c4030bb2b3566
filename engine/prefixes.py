"""The prefix cache as the engine uses it: looked up, taken from, and fed by sequences."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import mlx.core as mx

from chairlift.cache.prefix import Evicted, PrefixTree
from chairlift.cache.snapshot import LayerKind, Snapshot
from chairlift.cache.store import PrefixStore
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class Prefixes:
    """Between sequences, which have tokens and a tenant's salt, and the tree of snapshots.

    Args:
        kinds: what each layer keeps.
        budget: bytes held in memory at most; 0 turns the prefix cache off.
        store: takes what memory has no room for; None forgets it.
    """

    def __init__(self, kinds: Seq[LayerKind], budget: int, store: PrefixStore | None) -> None:
        self._tree = PrefixTree(kinds, budget, self._dropped)
        self._store = store
        self._closing: list[Evicted] | None = None

    @property
    def active(self) -> bool:
        """Whether anything can be held at all."""
        return self._tree.budget > 0

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self._tree.nbytes

    @property
    def evictions(self) -> int:
        """Entries dropped so far to make room."""
        return self._tree.evictions

    def fetch(self, sequence: Sequence) -> None:
        """Brings back from disk what leads further than what is in memory."""
        if self._store is None:
            return
        tokens, salt = sequence.tokens[:-1], sequence.cache_salt
        have = self._tree.match(tokens, salt=salt).length
        loaded = self._store.load(self._store.find(tokens, have, salt))
        for snapshot in loaded.snapshots:
            if not self._tree.insert(tokens[: snapshot.stop], snapshot, salt):
                break
        mx.eval(self._tree.take_pending())
        if loaded.nbytes:
            log.info("read %d bytes of prefixes in %.2f s", loaded.nbytes, loaded.seconds)

    def cached(self, sequence: Sequence) -> int:
        """How many first tokens of a sequence are held; its last one is computed in any case.

        Notes on it how many it shares with others, held in a usable form or not.
        """
        most = len(sequence.tokens) - 1
        match = self._tree.match(sequence.tokens, most, sequence.cache_salt)
        sequence.shared = match.known
        return match.length

    def state(self, sequence: Sequence, length: int) -> Snapshot | None:
        """The caches after a sequence's first ``length`` tokens, which ``cached`` promised."""
        if not length:
            return None
        match = self._tree.match(sequence.tokens, length, sequence.cache_salt)
        assert match.length == length, (match.length, length)
        return match.snapshot()

    def keep(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Takes over what is new in a snapshot of a sequence's first tokens."""
        # A token may have been in flight when the sequence was ended.
        snapshot = snapshot.part(0, min(snapshot.stop, len(sequence.tokens)))
        self._tree.insert(sequence.tokens[: snapshot.stop], snapshot, sequence.cache_salt)

    def take_pending(self) -> list[mx.array]:
        """Copies that have to be evaluated before the buffers they are taken from change."""
        return self._tree.take_pending()

    def close(self, timeout: float) -> None:
        """Writes all that is in memory to disk, for so many seconds at most."""
        if self._store is None:
            return
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
