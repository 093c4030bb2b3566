"""The prefix cache as the engine uses it: looked up, taken from, and fed by sequences."""

from __future__ import annotations

import mlx.core as mx

from chairlift.cache.prefix import PrefixTree
from chairlift.cache.snapshot import Snapshot
from chairlift.scheduler.sequence import Sequence


class Prefixes:
    """Between sequences, which have tokens and a tenant's salt, and the tree of snapshots."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree

    @property
    def active(self) -> bool:
        """Whether anything can be held at all."""
        return self._tree.budget > 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tree.nbytes

    @property
    def evictions(self) -> int:
        """Entries dropped so far to make room."""
        return self._tree.evictions

    def cached(self, sequence: Sequence) -> int:
        """How many first tokens of a sequence are held; its last one is computed in any case."""
        if not self.active:
            return 0
        most = len(sequence.tokens) - 1
        return self._tree.match(sequence.tokens, most, sequence.cache_salt).length

    def state(self, sequence: Sequence, length: int) -> Snapshot | None:
        """The caches after a sequence's first ``length`` tokens, which ``cached`` promised."""
        if not length:
            return None
        match = self._tree.match(sequence.tokens, length, sequence.cache_salt)
        assert match.length == length, (match.length, length)
        return match.snapshot()

    def keep(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Takes over what is new in a snapshot of a sequence's first tokens."""
        if not self.active:
            return
        known = len(sequence.tokens)
        if snapshot.stop > known:  # a token was in flight when the sequence was ended
            snapshot, _ = snapshot.split(known)
        self._tree.insert(sequence.tokens[: snapshot.stop], snapshot, sequence.cache_salt)

    def take_pending(self) -> list[mx.array]:
        """Copies that have to be evaluated before the buffers they are taken from change."""
        return self._tree.take_pending()
