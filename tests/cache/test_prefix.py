"""The prefix tree: its rules one by one, and all together against a dictionary of prefixes."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chairlift.cache import path_digest
from chairlift.cache.path_digest import PathDigest
from chairlift.cache.prefix.match import Evicted, Match
from chairlift.cache.prefix.node import Walk, walk
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.snapshot import (
    KVPiece,
    LayerKind,
    LayerState,
    Snapshot,
    StatePiece,
    merged,
    resumable,
)
from chairlift.cache.token_ids import ids_of

FULL, WINDOW, STATE = LayerKind(), LayerKind(window=4), LayerKind(recurrent=True)
MIXTURES = {
    "full": [FULL, FULL],
    "full and windows": [FULL, WINDOW, LayerKind(window=7)],
    "full and recurrent": [FULL, STATE, STATE],
    "windows": [WINDOW, LayerKind(window=1), WINDOW],
    "all": [FULL, WINDOW, STATE],
}
# Bytes that one token or one state of the tests' layers takes.
TOKEN, STATE_BYTES = (2 * 3 + 2 * 1) * 4, (3 + 3) * 4

Prefix = tuple[int, ...]
# Which salt and tokens a path's digest is of, for all that tests have put into a tree.
PATHS: dict[str, tuple[str, Prefix]] = {}


def _number(prefix: Prefix, salt: str = "") -> int:
    """What tells a prefix from every other one, small enough to be exact as a float."""
    return zlib.crc32(repr((salt, prefix)).encode()) % 2**23


def _numbers(tokens: Prefix, start: int, salt: str) -> list[int]:
    return [_number(tokens[: i + 1], salt) for i in range(start, len(tokens))]


def _kv(layer: int, tokens: Prefix, start: int, salt: str = "") -> KVPiece:
    """Of each token of ``tokens[start:]``: layer, position, and the number of all up to it."""
    rows = [[layer, start + i, number] for i, number in enumerate(_numbers(tokens, start, salt))]
    keys = np.array([rows, np.negative(rows)], np.float32)[None]
    return KVPiece(mx.array(keys), mx.array(keys[..., 2:] + 0.5))


def _state(layer: int, tokens: Prefix, salt: str = "") -> StatePiece:
    numbers = [layer, len(tokens), _number(tokens, salt)]
    return StatePiece((mx.array([numbers], mx.float32), None, -mx.array([numbers], mx.float32)))


def _snap(
    kinds: Sequence[LayerKind],
    tokens: Iterable[int],
    start: int = 0,
    window: int | None = None,
    states: bool = True,
    salt: str = "",
) -> Snapshot:
    """``tokens[start:]``, of windows only the last ``window`` tokens, with states or without."""
    tokens = tuple(tokens)
    layers: list[LayerState | None] = []
    for i, kind in enumerate(kinds):
        oldest = start
        if kind.window is not None and window is not None:
            oldest = max(start, len(tokens) - window)
        if kind.recurrent:
            layers.append(_state(i, tokens, salt) if states and tokens else None)
        else:
            layers.append(_kv(i, tokens, oldest, salt) if oldest < len(tokens) else None)
    return Snapshot(start, len(tokens), tuple(layers))


def _assert_same(first: Snapshot, second: Snapshot) -> None:
    assert (first.start, first.stop) == (second.start, second.stop)
    for mine, other in zip(first.layers, second.layers, strict=True):
        assert type(mine) is type(other)
        if mine is not None and other is not None:
            for one, two in zip(mine.arrays, other.arrays, strict=True):
                assert np.array_equal(np.array(one), np.array(two))


def _assert_matches(tree: PrefixTree, tokens: Prefix, length: int, **more: Any) -> Match:
    """The match is this long, and gives what a sequence needs to go on from there."""
    match = tree.match(tokens, **more)
    assert match.length == length
    got = match.snapshot()
    salt = more.get("salt", "")
    _assert_same(got, merged(tree.kinds, [_snap(tree.kinds, tokens[:length], salt=salt)]))
    assert resumable(tree.kinds, [got])
    tree.check_integrity()
    return match


@cache
def _note(salt: str, tokens: Prefix) -> None:
    for stop in range(len(tokens) + 1):
        own = tokens[:stop]
        PATHS[PathDigest(salt).continued(own).hexdigest()] = salt, own


def _path_to(evicted: Evicted) -> tuple[str, Prefix]:
    """The salt, and all tokens from the root to the end of what was evicted."""
    salt, before = PATHS[evicted.before.hexdigest()]
    assert len(before) == evicted.start
    return salt, (*before, *evicted.edge)


def _evicted_tokens(evicted: Evicted) -> Prefix:
    return _path_to(evicted)[1]


def _tree(kinds: Sequence[LayerKind], budget: int = 10**6) -> tuple[PrefixTree, list[Evicted]]:
    evicted: list[Evicted] = []
    return PrefixTree(kinds, budget, evicted.append), evicted


def _put(tree: PrefixTree, tokens: Prefix, start: int = 0, **more: Any) -> bool:
    _note(more.get("salt", ""), tuple(tokens))
    put = tree.insert(tokens, _snap(tree.kinds, tokens, start, **more), more.get("salt", ""))
    tree.check_integrity()
    return put


# Two prompts with a system prompt of 8 tokens in common.
SYSTEM = tuple(range(8))
ONE, TWO = (*SYSTEM, 20, 21, 22, 23), (*SYSTEM, 30, 31, 32)


def test_full_attention_stops_anywhere() -> None:
    tree, _ = _tree([FULL])
    assert _put(tree, ONE)
    _assert_matches(tree, TWO, 8)
    _assert_matches(tree, ONE, 12)
    _assert_matches(tree, (*ONE, 5), 12)
    _assert_matches(tree, ONE, 5, max_tokens=5)
    for most in (0, -1):
        _assert_matches(tree, ONE, 0, max_tokens=most)
    _assert_matches(tree, (9, *ONE), 0)
    _assert_matches(tree, (), 0)
    assert (len(tree), tree.tokens, tree.nbytes) == (1, 12, 12 * TOKEN)


def test_the_second_prompt_reaches_to_where_it_differs_if_windows_are_complete() -> None:
    tree, _ = _tree([FULL, WINDOW])
    assert _put(tree, ONE)
    _assert_matches(tree, TWO, 8)


def test_a_window_reaches_only_to_where_its_newest_tokens_are() -> None:
    tree, _ = _tree([FULL, WINDOW])
    assert _put(tree, ONE, window=5)  # positions 7 to 11
    _assert_matches(tree, TWO, 0)
    _assert_matches(tree, ONE, 12)
    _assert_matches(tree, ONE, 10, max_tokens=10)
    _assert_matches(tree, ONE, 0, max_tokens=9)  # 6 would have to be there
    assert _put(tree, SYSTEM, window=3)
    _assert_matches(tree, ONE, 9, max_tokens=9)  # 6 and 7 are now held as well
    _assert_matches(tree, TWO, 8)
    _assert_matches(tree, ONE, 0, max_tokens=7)


def test_a_window_of_one_token_never_hinders() -> None:
    tree, _ = _tree([FULL, LayerKind(window=1)])
    assert _put(tree, ONE, window=0)
    _assert_matches(tree, TWO, 8)


def test_the_shorter_window_does_not_stand_in_for_the_longer() -> None:
    tree, _ = _tree([WINDOW, LayerKind(window=7)])
    assert _put(tree, ONE, window=6)
    _assert_matches(tree, ONE, 12)
    _assert_matches(tree, ONE, 0, max_tokens=11)


def test_a_run_before_a_gap_has_to_be_long_enough_itself() -> None:
    tree, _ = _tree([WINDOW])
    assert _put(tree, SYSTEM, window=2)  # 6 and 7: one too few to go on from 8
    assert _put(tree, ONE, 8, window=2)
    _assert_matches(tree, ONE, 0)
    assert _put(tree, SYSTEM, window=3)
    _assert_matches(tree, ONE, 8)


def test_of_layers_of_one_window_the_one_that_holds_least_counts() -> None:
    tree, _ = _tree([WINDOW, WINDOW])
    assert tree.insert(ONE, Snapshot(0, 12, (_kv(0, ONE, 0), _kv(1, ONE, 9))))
    _assert_matches(tree, ONE, 12)
    _assert_matches(tree, ONE, 0, max_tokens=11)


def test_layers_that_fall_back_in_turn_agree_in_the_end() -> None:
    """The state is at 8, the window is not there; where it is there again, the state is at 3."""
    tree, _ = _tree([FULL, WINDOW, STATE])
    assert _put(tree, SYSTEM[:3])
    assert _put(tree, SYSTEM[:5], 3, states=False)
    assert _put(tree, SYSTEM, 5, window=1)
    assert _put(tree, ONE, 8, states=False)
    _assert_matches(tree, ONE, 3)


def test_a_match_uses_only_what_it_returns() -> None:
    tree, _ = _tree([FULL, STATE])
    assert _put(tree, SYSTEM)
    assert _put(tree, ONE, 8, states=False)
    assert _put(tree, (60, 61))
    _assert_matches(tree, ONE, 8)
    tree.evict(TOKEN)
    assert (tree.match(ONE).known, tree.match((60, 61)).length) == (8, 2)


def test_a_match_reads_the_same_after_its_node_was_cut_behind_it() -> None:
    tree, _ = _tree([FULL])
    assert _put(tree, ONE)
    match = tree.match(ONE, 5)
    assert _put(tree, TWO)  # cuts at 8
    _assert_same(match.snapshot(), _snap([FULL], ONE[:5]))
    assert _put(tree, (*ONE[:3], 9))
    _assert_same(match.snapshot(), _snap([FULL], ONE[:5]))


def test_a_recurrent_layer_falls_back_to_the_checkpoint_before() -> None:
    tree, _ = _tree([FULL, STATE])
    assert _put(tree, SYSTEM[:6])
    assert _put(tree, ONE, 6)
    _assert_matches(tree, ONE, 12)
    _assert_matches(tree, TWO, 6)
    _assert_matches(tree, ONE, 6, max_tokens=11)
    _assert_matches(tree, ONE, 0, max_tokens=5)


def test_a_checkpoint_inside_an_edge_splits_it() -> None:
    tree, _ = _tree([FULL, STATE])
    assert _put(tree, ONE)
    assert (len(tree), tree.nbytes) == (1, 12 * TOKEN + STATE_BYTES)
    assert _put(tree, SYSTEM)
    assert (len(tree), tree.tokens, tree.nbytes) == (2, 12, 12 * TOKEN + 2 * STATE_BYTES)
    _assert_matches(tree, TWO, 8)
    _assert_matches(tree, ONE, 12)
    # One that covers no tokens at all: a state only.
    assert _put(tree, ONE[:10], 10)
    assert len(tree) == 3
    _assert_matches(tree, ONE, 10, max_tokens=11)


def test_what_the_tree_has_is_not_stored_again() -> None:
    for kinds in MIXTURES.values():
        tree, _ = _tree(kinds)
        assert _put(tree, ONE)
        mx.eval(tree.take_pending())
        before = (len(tree), tree.nbytes)
        assert _put(tree, ONE)
        assert _put(tree, ONE[:7], states=False)
        assert _put(tree, ONE, 5)
        assert (len(tree), tree.nbytes) == before
        assert tree.take_pending() == []


def test_only_what_is_new_is_stored() -> None:
    tree, _ = _tree([FULL])
    assert _put(tree, ONE)
    assert _put(tree, TWO)
    assert (len(tree), tree.tokens, tree.nbytes) == (3, 15, 15 * TOKEN)
    _assert_matches(tree, ONE, 12)
    _assert_matches(tree, TWO, 11)


def test_a_chat_goes_on_after_the_reply() -> None:
    """Prompt, reply of a row that ended anywhere, next turn; all of it cached but the last turn."""
    for kinds in MIXTURES.values():
        tree, _ = _tree(kinds)
        reply = (*ONE, 40, 41, 42)
        assert _put(tree, ONE)
        assert _put(tree, reply, 12)
        _assert_matches(tree, (*reply, 50, 51), 15)
        assert _put(tree, (*reply, 50, 51, 60), 15, window=3)
        _assert_matches(tree, (*reply, 50, 51, 60, 70), 18)


def test_a_snapshot_without_its_beginning_is_refused() -> None:
    tree, _ = _tree([FULL])
    assert not _put(tree, ONE, 1)
    assert _put(tree, SYSTEM)
    assert not _put(tree, ONE, 9)
    assert not _put(tree, (3, *ONE), 5)
    assert (tree.tokens, tree.nbytes) == (8, 8 * TOKEN)
    assert _put(tree, ONE, 8)
    assert _put(tree, (*ONE[:10], 77), 10), "also from inside an edge"
    _assert_matches(tree, (*ONE[:10], 77), 11)


def test_what_cannot_be_of_these_layers_is_an_error() -> None:
    tree, _ = _tree([FULL, STATE])
    kv, state = _kv(0, ONE, 0), _state(1, ONE)
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


def test_salts_do_not_see_each_other_but_share_the_budget() -> None:
    tree, evicted = _tree([FULL], budget=20 * TOKEN)
    assert _put(tree, ONE, salt="a")
    _assert_matches(tree, ONE, 0)
    _assert_matches(tree, ONE, 0, salt="b")
    assert _put(tree, SYSTEM, salt="b")
    assert not _put(tree, ONE, 8, salt="c")
    _assert_matches(tree, ONE, 12, salt="a")
    assert _put(tree, SYSTEM[:3], salt="c")
    assert [_path_to(e) for e in evicted] == [("b", SYSTEM)]


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree, evicted = _tree([FULL], budget=19 * TOKEN)
    assert _put(tree, ONE)
    assert _put(tree, TWO)
    assert _put(tree, (*SYSTEM, 40, 41, 42, 43))
    tree.match(ONE)
    assert _put(tree, (60, 61, 62))
    assert [_evicted_tokens(e) for e in evicted] == [TWO]
    assert evicted[0].start == 8
    _assert_same(evicted[0].snapshot, _snap([FULL], TWO, 8))
    assert _put(tree, (70,))
    assert [e.edge[-1] for e in evicted] == [32, 43]
    assert tree.evict(1) == 4 * TOKEN
    assert _evicted_tokens(evicted[-1]) == ONE, "not their common start: it was used later"
    assert tree.evict(10**9) == 12 * TOKEN
    assert [_evicted_tokens(e) for e in evicted[3:]] == [SYSTEM, (60, 61, 62), (70,)]
    assert (tree.evictions, len(tree), tree.nbytes, tree.tokens) == (6, 0, 0, 0)
    assert tree.evict(1) == 0


def test_what_is_inserted_is_not_evicted_to_make_room_for_itself() -> None:
    tree, evicted = _tree([FULL], budget=14 * TOKEN)
    assert _put(tree, ONE[:10])
    assert _put(tree, (*TWO[:4], 50, 51, 52))  # shares 4: cuts ONE, 10 + 3 in all
    assert _put(tree, (*TWO[:4], 50, 51, 52, 53, 54), 7)
    assert [_evicted_tokens(e) for e in evicted] == [ONE[:10]]
    _assert_matches(tree, ONE, 4)
    assert not _put(tree, (*SYSTEM[:4], *range(100, 111))), "15 tokens are too many"
    assert not _put(tree, (*SYSTEM[:4], 50, *range(100, 110)), 5), "nor with what they continue"
    assert _put(tree, (*SYSTEM[:4], 50, *range(100, 109)), 5), "14 are just right"
    assert tree.nbytes == 14 * TOKEN


def test_too_large_alone_is_refused_and_changes_nothing() -> None:
    tree, evicted = _tree([FULL], budget=9 * TOKEN)
    assert _put(tree, SYSTEM)
    assert not _put(tree, ONE)
    assert not _put(tree, range(50, 60))
    assert (len(tree), evicted) == (1, [])
    _assert_matches(tree, ONE, 8)


def test_a_budget_of_nothing_holds_nothing() -> None:
    tree, evicted = _tree([FULL, STATE], budget=0)
    assert not _put(tree, ONE)
    assert not _put(tree, ())
    assert (tree.match(ONE).length, len(tree), evicted) == (0, 0, [])


def test_a_match_whose_node_was_evicted_cannot_be_read() -> None:
    tree, _ = _tree([FULL])
    assert _put(tree, ONE)
    match = tree.match(ONE, 10)
    tree.evict(10**9)
    with pytest.raises(ValueError, match="match of 10 tokens is no longer"):
        match.snapshot()


def test_a_match_reads_the_same_after_a_split_and_an_eviction() -> None:
    tree, _ = _tree([FULL, STATE])
    assert _put(tree, ONE)
    whole = tree.match(ONE)
    assert _put(tree, TWO)  # splits ONE at 8
    _assert_matches(tree, ONE, 12)
    tree.evict(TOKEN)
    tree.check_integrity()
    _assert_same(whole.snapshot(), _snap([FULL, STATE], ONE))


def test_an_empty_match_is_an_empty_snapshot() -> None:
    tree, _ = _tree([FULL])
    assert tree.match(ONE).snapshot().nbytes == 0


def test_clear_forgets_without_handing_on() -> None:
    tree, evicted = _tree([FULL])
    _put(tree, ONE)
    _put(tree, TWO, salt="b")
    tree.clear()
    tree.check_integrity()
    assert (len(tree), tree.nbytes, tree.evictions, evicted) == (0, 0, 0, [])


def test_pending_copies_let_go_of_the_big_buffers() -> None:
    tree, evicted = _tree([FULL], budget=10**9)
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


SALTS = st.sampled_from(["", "", "", "tenant"])
# Sequences that share much with each other, and end anywhere.
TOKENS = st.builds(
    lambda base, cut, more: (*base[:cut], *more),
    st.sampled_from([(0,) * 14, (0,) * 6 + (1,) * 8, (0, 1) * 7]),
    st.integers(0, 14).map(lambda short: 14 - short),
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
    """The tree beside a dictionary that has, by salt and prefix, which layers hold its last token
    (or, recurrent ones, the state behind it), and when the node it lies in was last used.
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
        """Checks that it was the least recently used leaf, with exactly what was inserted."""
        (salt, tokens), snapshot = _path_to(evicted), evicted.snapshot
        gone = _prefixes(salt, tokens)[evicted.start :]
        for position, key in enumerate(gone, evicted.start + 1):
            assert self.oracle.pop(key) == _layers_at(snapshot, position)
        assert not any((s, t[: len(tokens)]) == (salt, tokens) for s, t in self.oracle), "no leaf"
        for node in self.tree._by_use:
            first = _prefixes(node.salt, _path_of(node))[node.start]
            assert self.used[gone[0]] <= self.used[first], "that was used earlier"
        for i, piece in enumerate(snapshot.layers):
            if piece is not None:
                oldest = len(tokens) - (piece.tokens if isinstance(piece, KVPiece) else 0)
                recurrent = self.kinds[i].recurrent
                right = _state(i, tokens, salt) if recurrent else _kv(i, tokens, oldest, salt)
                for one, two in zip(piece.arrays, right.arrays, strict=True):
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
        """Whether the new tokens and the path that they continue fit the budget together."""
        salt = next(iter(new))[0]
        keep = set(new)
        last = next(iter(self._walk(tokens, salt).path[::-1]), None)
        path = _path_of(last)
        if len(path) > len(tokens):  # unless something is put in its middle, the node stays whole
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
        snapshot = _snap(self.kinds, tokens, start, window, states, salt)
        new = {key: _layers_at(snapshot, len(key[1])) for key in _prefixes(salt, tokens)}
        before = (self.tree.nbytes, len(self.tree), self.evictions)
        if start > known or (new and not self._fits(tokens, new)):
            assert not self.tree.insert(tokens, snapshot, salt)
            assert (self.tree.nbytes, len(self.tree), self.evictions) == before
            return
        self._touch(salt, tokens)
        _note(salt, tokens)
        assert self.tree.insert(tokens, snapshot, salt)
        for key, layers in new.items():
            self.oracle[key] = self.oracle.get(key, set()) | layers
        last = self._walk(tokens, salt).path[-1:]
        self._touch(salt, _path_of(last[0]) if last else ())

    def _expected(self, tokens: Prefix, salt: str) -> int:
        for position in range(self._known(tokens, salt), 0, -1):
            held = [self.oracle[key] for key in _prefixes(salt, tokens[:position])]
            if all(
                i in held[-1]
                if kind.recurrent
                else all(i in layers for layers in held[position - kind.needed(position) :])
                for i, kind in enumerate(self.kinds)
            ):
                return position
        return 0

    @rule(tokens=TOKENS, most=st.none() | st.integers(1, 14), salt=SALTS)
    def match(self, tokens: Prefix, most: int | None, salt: str) -> None:
        match = self.tree.match(tokens, most, salt)
        tokens = tokens[:most]
        assert match.length == self._expected(tokens, salt)
        self._touch(salt, _path_of(match.node))
        whole = _snap(self.kinds, tokens[: match.length], salt=salt)
        _assert_same(match.snapshot(), merged(self.kinds, [whole]))

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

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really == 9:
            self.tree.clear()
            self.oracle = {}

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check_integrity()
            assert self.tree.tokens == len(self.oracle)
            assert self.tree.nbytes == sum(map(self._bytes_of, self.oracle.values()))
            assert self.tree.evictions == self.evictions


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# Tokens of a conversation, and of each turn that became a node.
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
    """However many nodes it has: and its tokens are nowhere put together."""
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
    assert tokens_hashed == CONVERSATION - turn, "all edges but the last, which nothing follows"
    # The edges are the tree's own; a tuple of all tokens would take a million bytes.
    assert peak < 300_000 + 1_000 * len(evicted)
    assert [own.start for own in evicted] == [*range(CONVERSATION - turn, -1, -turn)]
    salt = path_digest.salt_digest("")
    starts = sorted(own.start for own in evicted)
    digests = path_digest.prefix_digests(salt, np.arange(CONVERSATION, dtype=np.int32), starts)
    assert [own.before.hexdigest() for own in reversed(evicted)] == digests


def test_nothing_is_hashed_or_made_of_what_nobody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(tokens: Any) -> Any:
        raise AssertionError("nobody has asked for it")

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


def test_a_path_keeps_its_digest_where_an_edge_is_cut() -> None:
    tree, evicted = _tree([FULL])
    assert _put(tree, ONE)
    assert _put(tree, (*ONE, 40))
    tree.evict(1)  # the leaf behind ONE, whose digest is known now
    assert _put(tree, TWO)  # cuts ONE at 8
    assert _put(tree, (*ONE, 41, 42))
    tree.evict(10**9)
    paths = [(*ONE, 40), (*ONE, 41, 42), ONE, TWO, SYSTEM]
    assert sorted(map(_evicted_tokens, evicted)) == sorted(paths)


def test_the_version_changes_with_all_that_a_match_may_give() -> None:
    tree, _ = _tree([FULL, STATE])
    versions = [tree.version]

    def changed() -> bool:
        versions.append(tree.version)
        return versions[-1] != versions[-2]

    assert _put(tree, SYSTEM, states=False)
    assert changed()
    assert _put(tree, SYSTEM)
    assert changed(), "a state more"
    tree.match(ONE)
    assert not _put(tree, ONE, 9)
    assert _put(tree, SYSTEM)
    assert not changed()
    assert _put(tree, ONE[:4])
    assert changed(), "a node was cut, and has a state"
    tree.evict(1)
    assert changed()
    tree.clear()
    assert changed()
