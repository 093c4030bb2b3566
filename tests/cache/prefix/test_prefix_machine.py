"""Random operations on a prefix tree, checked against a dictionary of prefixes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.cache.prefix import (
    MIXTURES,
    STATE_BYTES,
    TOKEN,
    Prefix,
    assert_same_snapshot,
    evicted_path,
    kv_piece,
    record_path,
    snapshot_of,
    state_piece,
)

from chairlift.cache.prefix.match import Evicted
from chairlift.cache.prefix.node import Walk, walk
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.snapshot import KVPiece, Snapshot, StatePiece, merged
from chairlift.cache.token_ids import ids_of

SALTS = st.sampled_from(["", "", "", "tenant"])
# Sequences that share long prefixes with each other and end at any length.
TOKENS = st.builds(
    lambda base, cut, more: (*base[:cut], *more),
    st.sampled_from([(0,) * 14, (0,) * 6 + (1,) * 8, (0, 1) * 7]),
    st.integers(0, 14).map(lambda missing: 14 - missing),
    st.just(()) | st.lists(st.integers(0, 1), max_size=3),
)
Key = tuple[str, Prefix]


def _prefixes(salt: str, tokens: Prefix) -> list[Key]:
    return [(salt, tokens[: i + 1]) for i in range(len(tokens))]


def _layers_at(snapshot: Snapshot, position: int) -> set[int]:
    """The layers that hold the token before ``position``, or the state at it."""
    return {
        i
        for i, piece in enumerate(snapshot.layers)
        if (isinstance(piece, KVPiece) and snapshot.stop - piece.tokens < position)
        or (isinstance(piece, StatePiece) and position == snapshot.stop)
    }


def _path_of(node: Any) -> Prefix:
    """The tokens from the root to the end of one of the tree's nodes."""
    edges = [tuple(above.edge) for above in node.upwards()] if node else []
    return tuple(token for edge in reversed(edges) for token in edge)


class PrefixMachine(RuleBasedStateMachine):
    """A prefix tree, and two dictionaries keyed by salt and prefix.

    Attributes:
        oracle: the layers that hold the prefix's last token, or the state behind it.
        used: when the node that holds the prefix's last token was last used.
    """

    @initialize(name=st.sampled_from(sorted(MIXTURES)), tokens=st.sampled_from([10**6, 50, 25, 12]))
    def begin(self, name: str, tokens: int) -> None:
        self.kinds = MIXTURES[name]
        self.tree = PrefixTree(self.kinds, tokens * TOKEN * len(self.kinds), self._evicted)
        self.oracle: dict[Key, set[int]] = {}
        self.used: dict[Key, int] = {}
        self.now = self.evictions = 0
        for stop in (3, 8, 14):
            self.insert((0,) * stop, 99, 3 if stop == 8 else None, True, "")

    def _evicted(self, evicted: Evicted) -> None:
        """An evicted node was the least recently used leaf; it holds what was inserted."""
        (salt, tokens), snapshot = evicted_path(evicted), evicted.snapshot
        gone = _prefixes(salt, tokens)[evicted.start :]
        for position, key in enumerate(gone, evicted.start + 1):
            assert self.oracle.pop(key) == _layers_at(snapshot, position)
        assert not any((s, t[: len(tokens)]) == (salt, tokens) for s, t in self.oracle), (
            "not a leaf"
        )
        for node in self.tree._by_use:
            first = _prefixes(node.salt, _path_of(node))[node.start]
            assert self.used[gone[0]] <= self.used[first], "another leaf was used earlier"
        for i, piece in enumerate(snapshot.layers):
            if piece is not None:
                oldest = len(tokens) - (piece.tokens if isinstance(piece, KVPiece) else 0)
                recurrent = self.kinds[i].recurrent
                expected = (
                    state_piece(i, tokens, salt) if recurrent else kv_piece(i, tokens, oldest, salt)
                )
                for one, two in zip(piece.arrays, expected.arrays, strict=True):
                    assert np.array_equal(np.array(one), np.array(two))
        self.evictions += 1

    def _walk(self, tokens: Prefix, salt: str) -> Walk:
        return walk(self.tree._roots.get(salt), ids_of(tokens))

    def _known(self, tokens: Prefix, salt: str) -> int:
        return sum(key in self.oracle for key in _prefixes(salt, tokens))

    def _bytes_of(self, layers: set[int]) -> int:
        return sum(STATE_BYTES if self.kinds[i].recurrent else TOKEN for i in layers)

    def _touch(self, salt: str, tokens: Prefix) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(_prefixes(salt, tokens), self.now))

    def _fits(self, tokens: Prefix, new: dict[Key, set[int]]) -> bool:
        """Whether the new tokens fit beside the path that they continue."""
        salt = next(iter(new))[0]
        keep = set(new)
        last = next(iter(self._walk(tokens, salt).path[::-1]), None)
        path = _path_of(last)
        if len(path) > len(tokens):  # the node is not split unless something is inserted inside it
            inner = _prefixes(salt, tokens)[last.start :] if last else []
            if self._known(tokens, salt) == len(tokens) and not any(
                new[key] - self.oracle[key] for key in inner
            ):
                keep |= set(_prefixes(salt, path))
        both = [self.oracle.get(key, set()) | new.get(key, set()) for key in keep]
        return sum(map(self._bytes_of, both)) <= self.tree.budget

    @rule(
        tokens=TOKENS,
        start=st.sampled_from([0, 0, 5, 99]),
        window=st.none() | st.integers(0, 12),
        states=st.sampled_from([True, True, False]),
        salt=SALTS,
    )
    def insert(
        self, tokens: Prefix, start: int, window: int | None, states: bool, salt: str
    ) -> None:
        known = self._known(tokens, salt)
        start = min(start, known + (start == 5), len(tokens))
        snapshot = snapshot_of(self.kinds, tokens, start, window, states, salt)
        new = {key: _layers_at(snapshot, len(key[1])) for key in _prefixes(salt, tokens)}
        before = (self.tree.nbytes, len(self.tree), self.evictions)
        if start > known or (new and not self._fits(tokens, new)):
            assert not self.tree.insert(tokens, snapshot, salt)
            assert (self.tree.nbytes, len(self.tree), self.evictions) == before
            return
        self._touch(salt, tokens)
        record_path(salt, tokens)
        assert self.tree.insert(tokens, snapshot, salt)
        for key, layers in new.items():
            self.oracle[key] = self.oracle.get(key, set()) | layers
        last = self._walk(tokens, salt).path[-1:]
        self._touch(salt, _path_of(last[0]) if last else ())

    def _expected(self, tokens: Prefix, salt: str) -> int:
        for position in range(self._known(tokens, salt), 0, -1):
            stored = [self.oracle[key] for key in _prefixes(salt, tokens[:position])]
            if all(
                i in stored[-1]
                if kind.recurrent
                else all(i in layers for layers in stored[position - kind.needed(position) :])
                for i, kind in enumerate(self.kinds)
            ):
                return position
        return 0

    @rule(tokens=TOKENS, max_tokens=st.none() | st.integers(1, 14), salt=SALTS)
    def match(self, tokens: Prefix, max_tokens: int | None, salt: str) -> None:
        match = self.tree.match(tokens, max_tokens, salt)
        tokens = tokens[:max_tokens]
        assert match.length == self._expected(tokens, salt)
        self._touch(salt, _path_of(match.node))
        expected = snapshot_of(self.kinds, tokens[: match.length], salt=salt)
        assert_same_snapshot(match.snapshot(), merged(self.kinds, [expected]))

    @rule(tokens=st.integers(0, 5))
    def evict(self, tokens: int) -> None:
        nbytes = tokens * TOKEN
        before = self.tree.nbytes
        freed = self.tree.evict(nbytes)
        assert freed == before - self.tree.nbytes
        if freed < nbytes:
            assert not self.oracle

    @rule()
    def evaluate(self) -> None:
        mx.eval(self.tree.take_pending())

    @rule(one_in_ten=st.integers(0, 9))
    def clear(self, one_in_ten: int) -> None:
        if one_in_ten == 9:
            self.tree.clear()
            self.oracle = {}

    @invariant()
    def tree_and_oracle_agree(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check_integrity()
            assert self.tree.tokens == len(self.oracle)
            assert self.tree.nbytes == sum(map(self._bytes_of, self.oracle.values()))
            assert self.tree.evictions == self.evictions


TestPrefixMachine = pytest.mark.slow(PrefixMachine.TestCase)
TestPrefixMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
