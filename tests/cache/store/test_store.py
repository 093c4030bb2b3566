"""The prefix store: chains of nodes, its budget, its queue, its loads."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import mlx.core as mx
import pytest
from support.cache.store import (
    KINDS,
    LARGE,
    PROMPT,
    MakeStore,
    assert_consistent,
    evicted_node,
    evicted_with,
    found_spans,
    kv_piece,
    load_all,
    put_all,
)

from chairlift.cache.prefix.match import Evicted
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.saved.layers import template_of
from chairlift.cache.saved.nodes import SavedNode
from chairlift.cache.snapshot import KVPiece, LayerKind, StatePiece
from chairlift.cache.store import files as store_files


def test_a_chain_of_nodes_is_found_behind_the_tokens_in_memory(make_store: MakeStore) -> None:
    store = make_store()
    put_all(
        store, evicted_node(PROMPT[:10]), evicted_node(PROMPT[:20], 10), evicted_node(PROMPT, 20)
    )
    assert found_spans(store, PROMPT, 0) == [(0, 10), (10, 20), (20, 30)]
    assert found_spans(store, PROMPT, 10) == [(10, 20), (20, 30)]
    assert found_spans(store, PROMPT, 13) == [(10, 20), (20, 30)]
    assert found_spans(store, PROMPT, 30) == []
    assert found_spans(store, PROMPT[:25], 10) == [(10, 20), (20, 25)]
    assert found_spans(store, [*PROMPT[:15], 7, 7], 10) == [(10, 15)]
    assert found_spans(store, [7, *PROMPT[1:]], 10) == []
    assert found_spans(store, PROMPT, 0, "other") == []
    load = store.load(store.find(PROMPT[:25], 12))
    assert load.ended.wait(5)
    snapshots = load.snapshots()
    assert [(s.start, s.stop) for s in snapshots] == [(10, 20), (20, 25)]
    assert load.nbytes == store.stats.read_bytes > 0
    assert load.seconds == store.stats.read_seconds > 0
    assert store.stats.read == 2
    for snapshot in snapshots:
        expected = kv_piece(PROMPT[snapshot.start : snapshot.stop])
        for piece in snapshot.layers:
            assert isinstance(piece, KVPiece)
            assert piece.keys.dtype == mx.bfloat16
            assert mx.array_equal(piece.keys, expected.keys)
            assert mx.array_equal(piece.values, expected.values)
    assert_consistent(store)


def test_a_node_behind_a_gap_is_not_found(make_store: MakeStore) -> None:
    store = make_store()
    put_all(store, evicted_node(PROMPT[:20], 10))
    assert found_spans(store, PROMPT, 9) == []


def test_nodes_with_states_are_found_only_at_their_end(make_store: MakeStore) -> None:
    store = make_store(kinds=(LayerKind(), LayerKind(recurrent=True)))
    state = StatePiece((mx.ones((1, 3)),))
    put_all(store, evicted_with(PROMPT, 0, "", kv_piece(PROMPT), state))
    assert found_spans(store, PROMPT[:29], 0) == []
    assert found_spans(store, [*PROMPT, 1], 0) == [(0, 30)]


def test_a_tree_loads_the_nodes_that_it_evicted_before_a_restart(make_store: MakeStore) -> None:
    evicted: list[Evicted] = []
    tree = PrefixTree(KINDS, LARGE, evicted.append)
    prompts = [[*PROMPT, *range(i, i + 20)] for i in (1, 50)]
    for prompt in prompts:
        assert tree.insert(prompt, evicted_node(prompt).snapshot, "me")
    mx.eval(tree.take_pending())
    tree.evict(tree.nbytes)
    assert len(evicted) == 3
    store = make_store()
    assert store.save_all(evicted, 5) == 3
    assert store.close(5)

    store, tree = (
        make_store(template=template_of(KINDS, evicted[0].snapshot)),
        PrefixTree(KINDS, LARGE),
    )
    assert_consistent(store)
    for prompt in prompts:
        length = tree.match(prompt, salt="me").length
        for snapshot in load_all(store, store.find(prompt, length, "me")):
            assert tree.insert(prompt[: snapshot.stop], snapshot, "me")
        match = tree.match(prompt, salt="me")
        assert match.length == len(prompt)
        piece = match.snapshot().layers[0]
        assert isinstance(piece, KVPiece)
        assert mx.array_equal(piece.keys, kv_piece(prompt).keys)
    tree.check_integrity()


def test_the_budget_keeps_the_nodes_used_last(make_store: MakeStore) -> None:
    store = make_store()
    nodes = [evicted_node([i, *PROMPT]) for i in range(6)]
    put_all(store, *nodes[:1])
    size = store.nbytes
    store.close(5)
    store = make_store(4 * size + 10)
    put_all(store, *nodes[1:4])
    assert len(load_all(store, store.find([0, *PROMPT], 0))) == 1  # used again
    put_all(store, *nodes[4:])
    left = [i for i in range(6) if found_spans(store, [i, *PROMPT], 0)]
    assert left == [0, 3, 4, 5]
    assert store.stats.evicted == 2
    assert store.nbytes <= 4 * size + 10
    assert_consistent(store)
    ago = time.time()
    for i in left:  # the order of use survives a restart
        (segment,) = store.find([i, *PROMPT], 0)
        when = ago - 100 + (50 if i == 0 else i)
        os.utime(store._files.directory / segment.entry.name, (when, when))
    store.close(5)
    store = make_store(2 * size + 10)
    assert [i for i in range(6) if found_spans(store, [i, *PROMPT], 0)] == [0, 5]
    assert_consistent(store)


def test_a_node_bigger_than_the_budget_is_not_kept(make_store: MakeStore) -> None:
    store = make_store(500)
    put_all(store, evicted_node(PROMPT))
    assert len(store) == 0
    assert_consistent(store)


def test_a_node_is_written_again_only_if_it_has_more_layers(make_store: MakeStore) -> None:
    store = make_store()
    partial = evicted_with(PROMPT, 0, "", kv_piece(PROMPT), None)
    put_all(store, partial, partial, evicted_node(PROMPT), partial)
    assert store.stats.written == 2
    (snapshot,) = load_all(store, store.find(PROMPT, 0))
    assert snapshot.layers[1] is not None
    assert_consistent(store)


def test_a_full_queue_drops_counts_and_logs_once(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, write = threading.Event(), store_files.write_node

    def slowly(file: Any, node: SavedNode) -> int:
        assert gate.wait(120)
        return write(file, node)

    monkeypatch.setattr(store_files, "write_node", slowly)
    nodes = [evicted_node([i, *PROMPT]) for i in range(5)]
    store = make_store(queue_bytes=3 * nodes[0].snapshot.nbytes + 1000)
    with caplog.at_level(logging.WARNING):
        began = time.perf_counter()
        assert [store.put(node) for node in nodes[:5]] == [True, True, True, False, False]
        assert time.perf_counter() - began < 60
    assert store.stats.dropped == 2
    assert len(caplog.records) == 1
    assert not store.flush(0.05)
    gate.set()
    assert store.flush(5)
    assert len(store) == 3
    gate.clear()
    assert store.save_all([evicted_node([9, *PROMPT])], 0.05) == 0  # it still waits
    gate.set()
    assert store.save_all(nodes, 5) == 5  # waits for room instead of dropping
    assert len(store) == 6
    assert store.close(5)
    assert not store.put(nodes[0])


def test_a_cancelled_load_ends_early_and_other_loads_go_on(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read, gate = make_store(), store_files.read_node, threading.Event()
    put_all(store, evicted_node(PROMPT[:10]), evicted_node(PROMPT, 10), evicted_node([7, *PROMPT]))

    def slowly(*args: Any) -> SavedNode:
        assert gate.wait(5)
        return read(*args)

    monkeypatch.setattr(store_files, "read_node", slowly)
    ended: list[int] = []
    store.on_change = lambda: ended.append(sum(load.ended.is_set() for load in loads))
    loads = [store.load(store.find(prompt, 0)) for prompt in (PROMPT, [7, *PROMPT])]
    assert not loads[0].ended.wait(0.02)
    loads[0].cancel()
    gate.set()
    assert loads[1].ended.wait(5)
    assert [len(load.snapshots()) for load in loads] == [1, 1]
    assert store.close(5)
    assert ended == [1, 2]


def test_a_read_that_fails_is_a_miss_and_the_next_read_works(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, read = make_store(), store_files.read_node
    put_all(store, evicted_node(PROMPT))

    def fail(*args: Any) -> SavedNode:
        raise MemoryError("none left")

    monkeypatch.setattr(store_files, "read_node", fail)
    with caplog.at_level(logging.WARNING):
        assert load_all(store, store.find(PROMPT, 0)) == []
    assert "none left" in caplog.text
    monkeypatch.setattr(store_files, "read_node", read)
    assert len(load_all(store, store.find(PROMPT, 0))) == 1
