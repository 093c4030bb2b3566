"""Matches in the prefix tree: their lengths for each kind of layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.cache.prefix import (
    FULL,
    ONE,
    STATE,
    STATE_BYTES,
    SYSTEM,
    TOKEN,
    TWO,
    WINDOW,
    assert_matches,
    assert_same_snapshot,
    insert,
    kv_piece,
    make_tree,
    snapshot_of,
)

from chairlift.cache.snapshot import LayerKind, Snapshot


def test_full_attention_matches_at_any_position() -> None:
    tree, _ = make_tree([FULL])
    assert insert(tree, ONE)
    assert_matches(tree, TWO, 8)
    assert_matches(tree, ONE, 12)
    assert_matches(tree, (*ONE, 5), 12)
    assert_matches(tree, ONE, 5, max_tokens=5)
    for max_tokens in (0, -1):
        assert_matches(tree, ONE, 0, max_tokens=max_tokens)
    assert_matches(tree, (9, *ONE), 0)
    assert_matches(tree, (), 0)
    assert (len(tree), tree.tokens, tree.nbytes) == (1, 12, 12 * TOKEN)


def test_a_second_prompt_matches_up_to_its_first_different_token_if_windows_are_complete() -> None:
    tree, _ = make_tree([FULL, WINDOW])
    assert insert(tree, ONE)
    assert_matches(tree, TWO, 8)


def test_a_window_matches_only_where_its_newest_tokens_are_stored() -> None:
    tree, _ = make_tree([FULL, WINDOW])
    assert insert(tree, ONE, window=5)  # positions 7 to 11
    assert_matches(tree, TWO, 0)
    assert_matches(tree, ONE, 12)
    assert_matches(tree, ONE, 10, max_tokens=10)
    assert_matches(tree, ONE, 0, max_tokens=9)  # position 6 is missing
    assert insert(tree, SYSTEM, window=3)
    assert_matches(tree, ONE, 9, max_tokens=9)  # positions 6 and 7 are stored now
    assert_matches(tree, TWO, 8)
    assert_matches(tree, ONE, 0, max_tokens=7)


def test_a_window_of_one_token_never_shortens_a_match() -> None:
    tree, _ = make_tree([FULL, LayerKind(window=1)])
    assert insert(tree, ONE, window=0)
    assert_matches(tree, TWO, 8)


def test_a_shorter_window_does_not_replace_a_longer_one() -> None:
    tree, _ = make_tree([WINDOW, LayerKind(window=7)])
    assert insert(tree, ONE, window=6)
    assert_matches(tree, ONE, 12)
    assert_matches(tree, ONE, 0, max_tokens=11)


def test_tokens_before_a_gap_have_to_fill_the_window_alone() -> None:
    tree, _ = make_tree([WINDOW])
    assert insert(tree, SYSTEM, window=2)  # 6 and 7: one too few to resume at 8
    assert insert(tree, ONE, 8, window=2)
    assert_matches(tree, ONE, 0)
    assert insert(tree, SYSTEM, window=3)
    assert_matches(tree, ONE, 8)


def test_the_layer_with_the_fewest_tokens_decides_among_equal_windows() -> None:
    tree, _ = make_tree([WINDOW, WINDOW])
    assert tree.insert(ONE, Snapshot(0, 12, (kv_piece(0, ONE, 0), kv_piece(1, ONE, 9))))
    assert_matches(tree, ONE, 12)
    assert_matches(tree, ONE, 0, max_tokens=11)


def test_layers_fall_back_until_all_can_resume() -> None:
    """The state is stored at 8, but not the window; the next position with both is 3."""
    tree, _ = make_tree([FULL, WINDOW, STATE])
    assert insert(tree, SYSTEM[:3])
    assert insert(tree, SYSTEM[:5], 3, states=False)
    assert insert(tree, SYSTEM, 5, window=1)
    assert insert(tree, ONE, 8, states=False)
    assert_matches(tree, ONE, 3)


def test_a_match_pins_only_what_it_returns() -> None:
    tree, _ = make_tree([FULL, STATE])
    assert insert(tree, SYSTEM)
    assert insert(tree, ONE, 8, states=False)
    assert insert(tree, (60, 61))
    assert_matches(tree, ONE, 8)
    tree.evict(TOKEN)
    assert (tree.match(ONE).known, tree.match((60, 61)).length) == (8, 2)


def test_a_match_keeps_its_snapshot_when_its_node_is_split_behind_it() -> None:
    tree, _ = make_tree([FULL])
    assert insert(tree, ONE)
    match = tree.match(ONE, 5)
    assert insert(tree, TWO)  # splits the node at 8
    assert_same_snapshot(match.snapshot(), snapshot_of([FULL], ONE[:5]))
    assert insert(tree, (*ONE[:3], 9))
    assert_same_snapshot(match.snapshot(), snapshot_of([FULL], ONE[:5]))


def test_a_recurrent_layer_falls_back_to_the_checkpoint_before() -> None:
    tree, _ = make_tree([FULL, STATE])
    assert insert(tree, SYSTEM[:6])
    assert insert(tree, ONE, 6)
    assert_matches(tree, ONE, 12)
    assert_matches(tree, TWO, 6)
    assert_matches(tree, ONE, 6, max_tokens=11)
    assert_matches(tree, ONE, 0, max_tokens=5)


def test_a_checkpoint_inside_an_edge_splits_it() -> None:
    tree, _ = make_tree([FULL, STATE])
    assert insert(tree, ONE)
    assert (len(tree), tree.nbytes) == (1, 12 * TOKEN + STATE_BYTES)
    assert insert(tree, SYSTEM)
    assert (len(tree), tree.tokens, tree.nbytes) == (2, 12, 12 * TOKEN + 2 * STATE_BYTES)
    assert_matches(tree, TWO, 8)
    assert_matches(tree, ONE, 12)
    # A checkpoint that covers no tokens: only a state.
    assert insert(tree, ONE[:10], 10)
    assert len(tree) == 3
    assert_matches(tree, ONE, 10, max_tokens=11)


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=8),
    begin=st.lists(st.integers(0, 2), max_size=12),
    count=st.integers(1, 8),
)
def test_a_continuation_is_that_of_an_earlier_text(
    texts: list[list[int]], begin: list[int], count: int
) -> None:
    tree, _ = make_tree([FULL])
    for text in texts:
        assert insert(tree, tuple(text))
    found = tree.continuation(begin, count)
    longer = [text for text in texts if text[: len(begin)] == begin and len(text) > len(begin)]
    assert bool(found) == bool(longer)
    assert len(found) <= count
    assert not found or any(text[len(begin) :][:count] == found for text in longer)
    assert tree.continuation(begin, count, salt="another") == []
