"""The directory of evicted prefixes: found again, bounded, shared, and never trusted."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.prefix.match import Evicted
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.saved.layers import template_of
from chairlift.cache.saved.nodes import SavedNode, fingerprint
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece
from chairlift.cache.store import files as store_files
from chairlift.cache.store.index import FileSegment
from chairlift.cache.store.parts import new_part, remove_abandoned
from chairlift.cache.store.store import PrefixStore
from chairlift.cache.token_ids import ids_of

KINDS = (LayerKind(), LayerKind(window=4))
MODEL = fingerprint("llama", "a")
LARGE = 1 << 30
MakeStore = Callable[..., PrefixStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeStore]:
    stores: list[PrefixStore] = []

    def make_store(budget: int = LARGE, model: str = MODEL, **options: Any) -> PrefixStore:
        kinds = options.pop("kinds", KINDS)
        stores.append(PrefixStore(tmp_path / "prefixes", budget, model, kinds, **options))
        return stores[-1]

    yield make_store
    for store in stores:
        store.close(5)


def _kv(tokens: Sequence[int]) -> KVPiece:
    """Keys that tell their tokens."""
    ids = mx.array(list(tokens), mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(ids, (1, 2, len(tokens), 4)).astype(mx.bfloat16)
    return KVPiece(keys, -ids)


def _node(tokens: Sequence[int], start: int = 0, salt: str = "") -> Evicted:
    piece = _kv(tokens[start:])
    return _evicted(tokens, start, salt, piece, piece)


def _evicted(
    tokens: Sequence[int], start: int, salt: str, *layers: KVPiece | StatePiece | None
) -> Evicted:
    before = PathDigest(salt).continued(tokens[:start])
    return Evicted(ids_of(tokens[start:]), before, Snapshot(start, len(tokens), layers))


def _saved(store: PrefixStore, *nodes: Evicted) -> None:
    for node in nodes:
        assert store.put(node)
        assert store.flush(5)


def _loaded(store: PrefixStore, segments: Sequence[FileSegment]) -> list[Snapshot]:
    load = store.load(segments)
    assert load.ended.wait(5)
    return load.snapshots()


def _files(store: PrefixStore) -> list[Path]:
    return sorted(store._files.directory.glob("*.safetensors"))


def _assert_consistent(store: PrefixStore) -> None:
    assert store.nbytes == sum(path.stat().st_size for path in _files(store))
    assert len(store) == len(_files(store))
    assert not list(store._files.directory.glob(".*"))


def _spans(store: PrefixStore, tokens: Sequence[int], at: int, salt: str = "") -> list[Any]:
    return [(s.entry.head.start, s.stop) for s in store.find(tokens, at, salt)]


PROMPT = list(range(100, 130))


def test_a_chain_is_found_behind_what_memory_has(make: MakeStore) -> None:
    store = make()
    _saved(store, _node(PROMPT[:10]), _node(PROMPT[:20], 10), _node(PROMPT, 20))
    assert _spans(store, PROMPT, 0) == [(0, 10), (10, 20), (20, 30)]
    assert _spans(store, PROMPT, 10) == [(10, 20), (20, 30)]
    assert _spans(store, PROMPT, 13) == [(10, 20), (20, 30)]
    assert _spans(store, PROMPT, 30) == []
    assert _spans(store, PROMPT[:25], 10) == [(10, 20), (20, 25)]
    assert _spans(store, [*PROMPT[:15], 7, 7], 10) == [(10, 15)]
    assert _spans(store, [7, *PROMPT[1:]], 10) == []
    assert _spans(store, PROMPT, 0, "other") == []
    load = store.load(store.find(PROMPT[:25], 12))
    assert load.ended.wait(5)
    snapshots = load.snapshots()
    assert [(s.start, s.stop) for s in snapshots] == [(10, 20), (20, 25)]
    assert load.nbytes == store.stats.read_bytes > 0
    assert load.seconds == store.stats.read_seconds > 0
    assert store.stats.read == 2
    for snapshot in snapshots:
        wanted = _kv(PROMPT[snapshot.start : snapshot.stop])
        for piece in snapshot.layers:
            assert isinstance(piece, KVPiece)
            assert piece.keys.dtype == mx.bfloat16
            assert mx.array_equal(piece.keys, wanted.keys)
            assert mx.array_equal(piece.values, wanted.values)
    _assert_consistent(store)


def test_what_starts_behind_a_gap_is_not_found(make: MakeStore) -> None:
    store = make()
    _saved(store, _node(PROMPT[:20], 10))
    assert _spans(store, PROMPT, 9) == []


def test_states_are_found_whole_only(make: MakeStore) -> None:
    store = make(kinds=(LayerKind(), LayerKind(recurrent=True)))
    state = StatePiece((mx.ones((1, 3)),))
    _saved(store, _evicted(PROMPT, 0, "", _kv(PROMPT), state))
    assert _spans(store, PROMPT[:29], 0) == []
    assert _spans(store, [*PROMPT, 1], 0) == [(0, 30)]


def test_a_tree_gets_back_what_it_dropped_before_a_restart(make: MakeStore) -> None:
    dropped: list[Evicted] = []
    tree = PrefixTree(KINDS, LARGE, dropped.append)
    prompts = [[*PROMPT, *range(i, i + 20)] for i in (1, 50)]
    for prompt in prompts:
        assert tree.insert(prompt, _node(prompt).snapshot, "me")
    mx.eval(tree.take_pending())
    tree.evict(tree.nbytes)
    assert len(dropped) == 3
    store = make()
    assert store.save_all(dropped, 5) == 3
    assert store.close(5)

    store, tree = make(template=template_of(KINDS, dropped[0].snapshot)), PrefixTree(KINDS, LARGE)
    _assert_consistent(store)
    for prompt in prompts:
        length = tree.match(prompt, salt="me").length
        for snapshot in _loaded(store, store.find(prompt, length, "me")):
            assert tree.insert(prompt[: snapshot.stop], snapshot, "me")
        match = tree.match(prompt, salt="me")
        assert match.length == len(prompt)
        piece = match.snapshot().layers[0]
        assert isinstance(piece, KVPiece)
        assert mx.array_equal(piece.keys, _kv(prompt).keys)
    tree.check_integrity()


def test_the_budget_keeps_what_was_used_last(make: MakeStore) -> None:
    store = make()
    nodes = [_node([i, *PROMPT]) for i in range(6)]
    _saved(store, *nodes[:1])
    size = store.nbytes
    store.close(5)
    store = make(4 * size + 10)
    _saved(store, *nodes[1:4])
    assert len(_loaded(store, store.find([0, *PROMPT], 0))) == 1  # used again
    _saved(store, *nodes[4:])
    left = [i for i in range(6) if _spans(store, [i, *PROMPT], 0)]
    assert left == [0, 3, 4, 5]
    assert store.stats.evicted == 2
    assert store.nbytes <= 4 * size + 10
    _assert_consistent(store)
    ago = time.time()
    for i in left:  # the order of use outlives a restart
        (segment,) = store.find([i, *PROMPT], 0)
        when = ago - 100 + (50 if i == 0 else i)
        os.utime(store._files.directory / segment.entry.name, (when, when))
    store.close(5)
    store = make(2 * size + 10)
    assert [i for i in range(6) if _spans(store, [i, *PROMPT], 0)] == [0, 5]
    _assert_consistent(store)


def test_a_node_bigger_than_the_budget_is_not_kept(make: MakeStore) -> None:
    store = make(500)
    _saved(store, _node(PROMPT))
    assert len(store) == 0
    _assert_consistent(store)


def test_a_node_is_written_once_and_again_only_if_it_is_richer(make: MakeStore) -> None:
    store = make()
    poor = _evicted(PROMPT, 0, "", _kv(PROMPT), None)
    _saved(store, poor, poor, _node(PROMPT), poor)
    assert store.stats.written == 2
    (snapshot,) = _loaded(store, store.find(PROMPT, 0))
    assert snapshot.layers[1] is not None
    _assert_consistent(store)


def test_a_full_queue_drops_counts_and_logs_once(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, write = threading.Event(), store_files.write_node

    def slowly(file: Any, node: SavedNode) -> int:
        assert gate.wait(10)
        return write(file, node)

    monkeypatch.setattr(store_files, "write_node", slowly)
    nodes = [_node([i, *PROMPT]) for i in range(5)]
    store = make(queue_bytes=3 * nodes[0].snapshot.nbytes + 1000)
    with caplog.at_level(logging.WARNING):
        began = time.perf_counter()
        assert [store.put(node) for node in nodes[:5]] == [True, True, True, False, False]
        assert time.perf_counter() - began < 1
    assert store.stats.dropped == 2
    assert len(caplog.records) == 1
    assert not store.flush(0.05)
    gate.set()
    assert store.flush(5)
    assert len(store) == 3
    assert store.save_all(nodes, 5) == 5  # waits for room instead
    assert len(store) == 5
    assert store.close(5)
    assert not store.put(nodes[0])


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_broken_files_are_a_miss_and_go(
    make: MakeStore, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    _saved(store, _node(PROMPT), _node([7, *PROMPT]))
    (segment,) = store.find(PROMPT, 0)
    path = store._files.directory / segment.entry.name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-3] ^= 4
    elif damage == "cut":
        data = data[:-9]
    elif damage == "empty":
        data = bytearray()
    else:
        (other,) = (file for file in _files(store) if file != path)
        data = bytearray(other.read_bytes())
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert _loaded(store, [segment]) == []
    assert "removed" in caplog.text
    assert store.stats.broken == 1
    assert not path.exists()
    assert store.find(PROMPT, 0) == []
    _assert_consistent(store)


def test_broken_files_at_the_start_are_removed(
    make: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    _saved(store, _node(PROMPT), _node([7, *PROMPT]))
    store.close(5)
    path = _files(store)[0]
    path.write_bytes(path.read_bytes()[:50])
    with caplog.at_level(logging.WARNING):
        store = make()
    assert len(caplog.records) == 1
    assert len(store) == 1
    _assert_consistent(store)


def test_files_of_others_are_left_alone(make: MakeStore) -> None:
    other = make(model=fingerprint("llama", "b"))
    _saved(other, _node(PROMPT))
    (theirs,) = _files(other)
    note = theirs.parent / "note.safetensors"
    note.write_text("mine")
    store = make(1000)
    assert store.find(PROMPT, 0) == []
    assert (len(store), store.nbytes) == (0, 0)
    # Not even under a name of this model is a file of another believed.
    liar = theirs.parent / theirs.name.replace(theirs.name[:16], MODEL[:16])
    liar.write_bytes(theirs.read_bytes())
    assert make(1000).find(PROMPT, 0) == []
    assert all(path.exists() for path in (theirs, note, liar))


def test_vanished_files_are_a_miss(make: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    store = make()
    _saved(store, _node(PROMPT[:10]), _node(PROMPT, 10))
    chain = store.find(PROMPT, 0)
    (store._files.directory / chain[1].entry.name).unlink()
    assert [s.stop for s in _loaded(store, chain)] == [10]
    assert _spans(store, PROMPT, 0) == [(0, 10)]
    assert not caplog.records
    _files(store)[0].unlink()
    _saved(store, _node([7, *PROMPT]))
    store._files.make_room(LARGE)
    assert len(store) == 0
    _assert_consistent(store)


WRITING = """
import sys, time
from pathlib import Path
from chairlift.cache.store.parts import new_part
with new_part(Path(sys.argv[1]), sys.argv[2]) as (file, part):
    file.write(b"half")
    file.flush()
    print(part.name, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_server_was_writing_goes_and_what_another_writes_stays(
    make: MakeStore, tmp_path: Path
) -> None:
    directory = tmp_path / "prefixes"
    directory.mkdir()
    precious = tmp_path / "precious"
    precious.touch()
    (directory / ".link.tmp").symlink_to(precious)
    (directory / ".folder.tmp").mkdir()
    others = {".link.tmp", ".folder.tmp"}
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITING, str(directory), "a"], stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        parts = [s.stdout.readline().decode().strip() for s in servers if s.stdout]
        # However old: a disk may be slow.
        os.utime(directory / parts[0], (0, 0))
        make()
        assert {path.name for path in directory.iterdir()} == {*parts, *others}
        servers[0].kill()
        servers[0].wait()
        make()
        assert {path.name for path in directory.iterdir()} == {parts[1], *others}
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    assert precious.exists()


def test_without_locks_halves_go_that_are_old(
    make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    directory = tmp_path / "prefixes"
    directory.mkdir()
    for name, age in ((".a.tmp", 10_000), (".b.tmp", 1)):
        (directory / name).write_text("x")
        os.utime(directory / name, (time.time() - age,) * 2)
    store = make()
    assert [path.name for path in directory.iterdir()] == [".b.tmp"]
    _saved(store, _node(PROMPT))
    assert len(_files(store)) == 1


def test_files_that_are_begun_survive_servers_that_start(tmp_path: Path) -> None:
    def write(number: int) -> bool:
        with new_part(tmp_path, str(number)) as (file, part):
            remove_abandoned(tmp_path)
            file.write(b"whole")
            file.flush()
            os.replace(part, tmp_path / str(number))
        return (tmp_path / str(number)).read_bytes() == b"whole"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write, range(400)))
    assert len(list(tmp_path.iterdir())) == 400


def test_a_full_disk_does_not_end_the_thread(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, write = make(), store_files.write_node

    def fail(file: Any, node: SavedNode) -> int:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_files, "write_node", fail)
    with caplog.at_level(logging.WARNING):
        _saved(store, _node(PROMPT), _node([7, *PROMPT]))
    assert store.stats.failed == 2
    assert len(caplog.records) == 1
    monkeypatch.setattr(store_files, "write_node", write)
    _saved(store, _node(PROMPT))
    assert len(store) == 1
    _assert_consistent(store)


def test_servers_that_share_a_directory(make: MakeStore) -> None:
    one = make()
    _saved(one, _node(PROMPT))
    budget = 5 * one.nbytes
    stores = [make(budget), make(budget)]
    errors: list[BaseException] = []

    def serve(store: PrefixStore, seed: int) -> None:
        # MLX's streams belong to threads.
        with mx.stream(mx.new_stream(mx.cpu)):
            try:
                for i in range(60):
                    prompt = [(seed * i) % 9, *PROMPT]
                    store.put(_node(prompt))
                    for snapshot in _loaded(store, store.find(prompt, 0)):
                        piece = snapshot.layers[0]
                        assert isinstance(piece, KVPiece)
                        assert mx.array_equal(piece.keys, _kv(prompt).keys)
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=serve, args=(store, seed))
        for store, seed in zip(stores, (5, 7), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert all(store.flush(5) for store in stores)
    assert not any(store.stats.broken or store.stats.failed for store in stores)
    for store in stores:
        store._files.rescan()
        _assert_consistent(store)


def test_files_of_another_server_are_found_by_a_rescan(make: MakeStore) -> None:
    first, second = make(), make()
    _saved(first, _node(PROMPT))
    assert second.find(PROMPT, 0) == []
    second._files.rescan()
    assert _spans(second, PROMPT, 0) == [(0, 30)]
    _files(first)[0].unlink()
    second._files.rescan()
    assert len(second) == 0


def test_the_directory_is_for_its_owner_only(make: MakeStore) -> None:
    store = make()
    _saved(store, _node(PROMPT))
    assert store._files.directory.stat().st_mode & 0o777 == 0o700
    assert _files(store)[0].stat().st_mode & 0o777 == 0o600


def test_a_load_that_nobody_waits_for_ends_early_and_others_go_on(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read, gate = make(), store_files.read_node, threading.Event()
    _saved(store, _node(PROMPT[:10]), _node(PROMPT, 10), _node([7, *PROMPT]))

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


def test_a_read_that_fails_is_a_miss_and_the_next_one_goes_on(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, read = make(), store_files.read_node
    _saved(store, _node(PROMPT))

    def fail(*args: Any) -> SavedNode:
        raise MemoryError("none left")

    monkeypatch.setattr(store_files, "read_node", fail)
    with caplog.at_level(logging.WARNING):
        assert _loaded(store, store.find(PROMPT, 0)) == []
    assert "none left" in caplog.text
    monkeypatch.setattr(store_files, "read_node", read)
    assert len(_loaded(store, store.find(PROMPT, 0))) == 1
