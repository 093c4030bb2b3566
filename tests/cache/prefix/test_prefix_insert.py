"""Inserts into the prefix tree: only new tokens are stored, and none without their beginning."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.cache.prefix import (
    FULL,
    MIXTURES,
    ONE,
    STATE,
    SYSTEM,
    TOKEN,
    TWO,
    assert_matches,
    evicted_path,
    insert,
    kv_piece,
    make_tree,
    state_piece,
)

from chairlift.cache.snapshot import Snapshot


def test_stored_tokens_are_not_stored_again() -> None:
    for kinds in MIXTURES.values():
        tree, _ = make_tree(kinds)
        assert insert(tree, ONE)
        mx.eval(tree.take_pending())
        before = (len(tree), tree.nbytes)
        assert insert(tree, ONE)
        assert insert(tree, ONE[:7], states=False)
        assert insert(tree, ONE, 5)
        assert (len(tree), tree.nbytes) == before
        assert tree.take_pending() == []


def test_only_new_tokens_are_stored() -> None:
    tree, _ = make_tree([FULL])
    assert insert(tree, ONE)
    assert insert(tree, TWO)
    assert (len(tree), tree.tokens, tree.nbytes) == (3, 15, 15 * TOKEN)
    assert_matches(tree, ONE, 12)
    assert_matches(tree, TWO, 11)


def test_the_next_turn_of_a_chat_matches_prompt_and_reply() -> None:
    """Of prompt, reply and next turn, everything before the last turn is cached."""
    for kinds in MIXTURES.values():
        tree, _ = make_tree(kinds)
        reply = (*ONE, 40, 41, 42)
        assert insert(tree, ONE)
        assert insert(tree, reply, 12)
        assert_matches(tree, (*reply, 50, 51), 15)
        assert insert(tree, (*reply, 50, 51, 60), 15, window=3)
        assert_matches(tree, (*reply, 50, 51, 60, 70), 18)


def test_a_snapshot_without_its_beginning_is_refused() -> None:
    tree, _ = make_tree([FULL])
    assert not insert(tree, ONE, 1)
    assert insert(tree, SYSTEM)
    assert not insert(tree, ONE, 9)
    assert not insert(tree, (3, *ONE), 5)
    assert (tree.tokens, tree.nbytes) == (8, 8 * TOKEN)
    assert insert(tree, ONE, 8)
    assert insert(tree, (*ONE[:10], 77), 10), "a snapshot may begin inside an edge"
    assert_matches(tree, (*ONE[:10], 77), 11)


def test_snapshots_of_other_layers_are_an_error() -> None:
    tree, _ = make_tree([FULL, STATE])
    kv, state = kv_piece(0, ONE, 0), state_piece(1, ONE)
    for layers, message in [
        ((kv,), "1 layers, but the tree has 2"),
        ((kv, kv), "layer 1 .* has a KVPiece"),
        ((state, state), "layer 0 .* has a StatePiece"),
        ((kv.newest(3), state), r"layer 0 has 3 tokens of \[0, 12\)"),
        ((None, state), r"layer 0 has 0 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree.insert(ONE, Snapshot(0, 12, layers))
    with pytest.raises(ValueError, match="up to 12 is not one of 11 tokens"):
        tree.insert(ONE[:11], Snapshot(0, 12, (kv, state)))
    assert len(tree) == 0


def test_salts_share_the_budget_but_no_prefixes() -> None:
    tree, evicted = make_tree([FULL], budget=20 * TOKEN)
    assert insert(tree, ONE, salt="a")
    assert_matches(tree, ONE, 0)
    assert_matches(tree, ONE, 0, salt="b")
    assert insert(tree, SYSTEM, salt="b")
    assert not insert(tree, ONE, 8, salt="c")
    assert_matches(tree, ONE, 12, salt="a")
    assert insert(tree, SYSTEM[:3], salt="c")
    assert [evicted_path(e) for e in evicted] == [("b", SYSTEM)]


def test_the_version_changes_whenever_a_match_could_change() -> None:
    tree, _ = make_tree([FULL, STATE])
    versions = [tree.version]

    def changed() -> bool:
        versions.append(tree.version)
        return versions[-1] != versions[-2]

    assert insert(tree, SYSTEM, states=False)
    assert changed()
    assert insert(tree, SYSTEM)
    assert changed(), "a state was added"
    tree.match(ONE)
    assert not insert(tree, ONE, 9)
    assert insert(tree, SYSTEM)
    assert not changed()
    assert insert(tree, ONE[:4])
    assert changed(), "a node was split and has a state"
    tree.evict(1)
    assert changed()
    tree.clear()
    assert changed()
