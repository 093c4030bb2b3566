"""The prefix tree's budget: what is evicted, what is refused, and what pins keep."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.cache.prefix import (
    FULL,
    ONE,
    STATE,
    SYSTEM,
    TOKEN,
    TWO,
    assert_matches,
    assert_same_snapshot,
    evicted_tokens,
    insert,
    make_tree,
    snapshot_of,
)

from chairlift.cache.snapshot import KVPiece, Snapshot


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree, evicted = make_tree([FULL], budget=19 * TOKEN)
    assert insert(tree, ONE)
    assert insert(tree, TWO)
    assert insert(tree, (*SYSTEM, 40, 41, 42, 43))
    tree.match(ONE)
    assert insert(tree, (60, 61, 62))
    assert [evicted_tokens(e) for e in evicted] == [TWO]
    assert evicted[0].start == 8
    assert_same_snapshot(evicted[0].snapshot, snapshot_of([FULL], TWO, 8))
    assert insert(tree, (70,))
    assert [e.edge[-1] for e in evicted] == [32, 43]
    assert tree.evict(1) == 4 * TOKEN
    assert evicted_tokens(evicted[-1]) == ONE, "not the common prefix: it was used later"
    assert tree.evict(10**9) == 12 * TOKEN
    assert [evicted_tokens(e) for e in evicted[3:]] == [SYSTEM, (60, 61, 62), (70,)]
    assert (tree.evictions, len(tree), tree.nbytes, tree.tokens) == (6, 0, 0, 0)
    assert tree.evict(1) == 0


def test_an_insert_does_not_evict_the_path_it_continues() -> None:
    tree, evicted = make_tree([FULL], budget=14 * TOKEN)
    assert insert(tree, ONE[:10])
    assert insert(tree, (*TWO[:4], 50, 51, 52))  # shares 4 tokens: splits ONE, 10 + 3 in all
    assert insert(tree, (*TWO[:4], 50, 51, 52, 53, 54), 7)
    assert [evicted_tokens(e) for e in evicted] == [ONE[:10]]
    assert_matches(tree, ONE, 4)
    assert not insert(tree, (*SYSTEM[:4], *range(100, 111))), "15 tokens are too many"
    assert not insert(tree, (*SYSTEM[:4], 50, *range(100, 110)), 5), (
        "and so are 10 with the 5 that they continue"
    )
    assert insert(tree, (*SYSTEM[:4], 50, *range(100, 109)), 5), "14 fit exactly"
    assert tree.nbytes == 14 * TOKEN


def test_a_snapshot_larger_than_the_budget_is_refused_and_changes_nothing() -> None:
    tree, evicted = make_tree([FULL], budget=9 * TOKEN)
    assert insert(tree, SYSTEM)
    assert not insert(tree, ONE)
    assert not insert(tree, range(50, 60))
    assert (len(tree), evicted) == (1, [])
    assert_matches(tree, ONE, 8)


def test_a_budget_of_zero_stores_nothing() -> None:
    tree, evicted = make_tree([FULL, STATE], budget=0)
    assert not insert(tree, ONE)
    assert not insert(tree, ())
    assert (tree.match(ONE).length, len(tree), evicted) == (0, 0, [])


def test_a_match_whose_node_was_evicted_cannot_be_read() -> None:
    tree, _ = make_tree([FULL])
    assert insert(tree, ONE)
    match = tree.match(ONE, 10)
    tree.evict(10**9)
    with pytest.raises(ValueError, match="match of 10 tokens is no longer"):
        match.snapshot()


def test_a_match_reads_the_same_after_a_split_and_an_eviction() -> None:
    tree, _ = make_tree([FULL, STATE])
    assert insert(tree, ONE)
    full = tree.match(ONE)
    assert insert(tree, TWO)  # splits ONE at 8
    assert_matches(tree, ONE, 12)
    tree.evict(TOKEN)
    tree.check_integrity()
    assert_same_snapshot(full.snapshot(), snapshot_of([FULL, STATE], ONE))


def test_an_empty_match_is_an_empty_snapshot() -> None:
    tree, _ = make_tree([FULL])
    assert tree.match(ONE).snapshot().nbytes == 0


def test_clear_does_not_report_evictions() -> None:
    tree, evicted = make_tree([FULL])
    insert(tree, ONE)
    insert(tree, TWO, salt="b")
    tree.clear()
    tree.check_integrity()
    assert (len(tree), tree.nbytes, tree.evictions, evicted) == (0, 0, 0, [])


def test_pending_copies_release_the_large_buffers() -> None:
    tree, evicted = make_tree([FULL], budget=10**9)
    tokens = tuple(range(40_000))
    kv = KVPiece(mx.zeros((1, 2, len(tokens), 4)), mx.zeros((1, 2, len(tokens), 4)))
    mx.eval(kv.arrays)
    base = mx.get_active_memory() - kv.nbytes
    assert tree.insert(tokens[:500], Snapshot(0, len(tokens), (kv,)).part(0, 500))
    assert tree.insert(tokens[:1000], Snapshot(0, len(tokens), (kv,)).part(400, 1000))
    del kv
    pending = tree.take_pending()
    assert sum(array.nbytes for array in pending) == tree.nbytes
    mx.eval(pending)
    del pending
    assert abs(mx.get_active_memory() - base - tree.nbytes) < 200_000
    assert tree.take_pending() == []
    assert tree.insert((*tokens[:300], 9), Snapshot(300, 301, (_big_token(),)))
    assert sum(array.nbytes for array in tree.take_pending()) == 501 * 64, "two halves, one leaf"
    assert tree.evict(10**9) == 1001 * 64
    del evicted[:]
    assert abs(mx.get_active_memory() - base) < 200_000


def _big_token() -> KVPiece:
    return KVPiece(mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4)))
