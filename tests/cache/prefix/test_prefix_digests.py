"""Digests of the paths to evicted nodes: computed once, and only if they are read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.cache.prefix import FULL, ONE, SYSTEM, TWO, evicted_tokens, insert, make_tree

from chairlift.cache import path_digest
from chairlift.cache.prefix.match import Evicted
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.snapshot import KVPiece, Snapshot
from chairlift.cache.token_ids import ids_of

# Tokens of a conversation, and of each of its turns; a turn is one node.
CONVERSATION, TURN = 131_072, 1024


def _conversation(on_evict: Callable[[Evicted], None] | None, turn: int = TURN) -> PrefixTree:
    tree = PrefixTree([FULL], 1 << 40, on_evict)
    tokens = ids_of(range(CONVERSATION))
    piece = KVPiece(mx.zeros((1, 1, turn, 1)), mx.zeros((1, 1, turn, 1)))
    for stop in range(turn, CONVERSATION + 1, turn):
        assert tree.insert(tokens[:stop], Snapshot(stop - turn, stop, (piece,)))
    assert len(tree) == CONVERSATION // turn
    return tree


@pytest.mark.parametrize("turn", [TURN, TURN // 4])
def test_the_path_to_what_is_evicted_is_hashed_once(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many nodes the path has. Its tokens are never copied into one sequence."""
    tokens_hashed = 0

    def counted(tokens: Any) -> path_digest.Ids:
        nonlocal tokens_hashed
        tokens_hashed += len(tokens)
        return convert(tokens)

    convert = path_digest.int32
    evicted: list[Evicted] = []
    tree = _conversation(evicted.append, turn)
    monkeypatch.setattr(path_digest, "int32", counted)
    tracemalloc.start()
    try:
        while tree.evict(1):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokens_hashed == CONVERSATION - turn, "all edges but the last: no node follows it"
    # The tree itself holds the edges; a tuple of all tokens would take a million bytes.
    assert peak < 300_000 + 1_000 * len(evicted)
    assert [node.start for node in evicted] == [*range(CONVERSATION - turn, -1, -turn)]
    salt = path_digest.salt_digest("")
    starts = sorted(node.start for node in evicted)
    digests = path_digest.prefix_digests(salt, np.arange(CONVERSATION, dtype=np.int32), starts)
    assert [node.before.hexdigest() for node in reversed(evicted)] == digests


def test_without_a_callback_evicted_nodes_are_neither_hashed_nor_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(tokens: Any) -> Any:
        raise AssertionError("the digest is not read")

    tree = _conversation(None)
    monkeypatch.setattr(path_digest, "int32", never)
    tracemalloc.start()
    try:
        tree.evict(1 << 40)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(tree), tree.evictions) == (0, CONVERSATION // TURN)
    assert peak < 50_000


def test_a_path_keeps_its_digest_when_an_edge_is_split() -> None:
    tree, evicted = make_tree([FULL])
    assert insert(tree, ONE)
    assert insert(tree, (*ONE, 40))
    tree.evict(1)  # the leaf behind ONE; now ONE's digest is known
    assert insert(tree, TWO)  # splits ONE at 8
    assert insert(tree, (*ONE, 41, 42))
    tree.evict(10**9)
    paths = [(*ONE, 40), (*ONE, 41, 42), ONE, TWO, SYSTEM]
    assert sorted(map(evicted_tokens, evicted)) == sorted(paths)
