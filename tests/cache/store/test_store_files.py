"""The files of a prefix store: broken, vanished, abandoned, and shared with other servers."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.cache.store import (
    LARGE,
    MODEL,
    PROMPT,
    MakeStore,
    assert_consistent,
    evicted_node,
    found_spans,
    kv_piece,
    load_all,
    put_all,
    stored_files,
)

from chairlift.cache.saved.nodes import SavedNode, fingerprint
from chairlift.cache.snapshot import KVPiece
from chairlift.cache.store import files as store_files
from chairlift.cache.store.parts import new_part, remove_abandoned
from chairlift.cache.store.store import PrefixStore


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_broken_files_are_a_miss_and_are_removed(
    make_store: MakeStore, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    put_all(store, evicted_node(PROMPT), evicted_node([7, *PROMPT]))
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
        (other,) = (file for file in stored_files(store) if file != path)
        data = bytearray(other.read_bytes())
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert load_all(store, [segment]) == []
    assert "removed" in caplog.text
    assert store.stats.broken == 1
    assert not path.exists()
    assert store.find(PROMPT, 0) == []
    assert_consistent(store)


def test_broken_files_at_the_start_are_removed(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    put_all(store, evicted_node(PROMPT), evicted_node([7, *PROMPT]))
    store.close(5)
    path = stored_files(store)[0]
    path.write_bytes(path.read_bytes()[:50])
    with caplog.at_level(logging.WARNING):
        store = make_store()
    assert len(caplog.records) == 1
    assert len(store) == 1
    assert_consistent(store)


def test_files_of_other_models_are_left_alone(make_store: MakeStore) -> None:
    other = make_store(model=fingerprint("llama", "b"))
    put_all(other, evicted_node(PROMPT))
    (theirs,) = stored_files(other)
    note = theirs.parent / "note.safetensors"
    note.write_text("mine")
    store = make_store(1000)
    assert store.find(PROMPT, 0) == []
    assert (len(store), store.nbytes) == (0, 0)
    # A file of another model is not loaded even under a name of this model.
    disguised = theirs.parent / theirs.name.replace(theirs.name[:16], MODEL[:16])
    disguised.write_bytes(theirs.read_bytes())
    assert make_store(1000).find(PROMPT, 0) == []
    assert all(path.exists() for path in (theirs, note, disguised))


def test_pipes_and_folders_are_no_prefixes(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    put_all(store, evicted_node(PROMPT), evicted_node([7, *PROMPT]))
    pipe, folder = stored_files(store)
    store.close(5)
    for path in (pipe, folder):
        path.unlink()
    os.mkfifo(pipe)
    folder.mkdir()
    assert len(make_store()) == 0
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert not caplog.records


def test_vanished_files_are_a_miss(make_store: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store()
    put_all(store, evicted_node(PROMPT[:10]), evicted_node(PROMPT, 10))
    chain = store.find(PROMPT, 0)
    (store._files.directory / chain[1].entry.name).unlink()
    assert [s.stop for s in load_all(store, chain)] == [10]
    assert found_spans(store, PROMPT, 0) == [(0, 10)]
    assert not caplog.records
    stored_files(store)[0].unlink()
    put_all(store, evicted_node([7, *PROMPT]))
    store._files.make_room(LARGE)
    assert len(store) == 0
    assert_consistent(store)


# The part of a temporary file's name that makes it unique.
TOKEN = "0123456789abcdef"
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


def test_parts_of_a_killed_server_are_removed_and_those_of_a_running_one_stay(
    make_store: MakeStore, tmp_path: Path
) -> None:
    directory = tmp_path / "prefixes"
    directory.mkdir()
    linked = tmp_path / "linked"
    linked.touch()
    others = {f".link.{TOKEN}.tmp", f".folder.{TOKEN}.tmp", f".pipe.{TOKEN}.tmp", ".mine.tmp"}
    (directory / f".link.{TOKEN}.tmp").symlink_to(linked)
    (directory / f".folder.{TOKEN}.tmp").mkdir()
    os.mkfifo(directory / f".pipe.{TOKEN}.tmp")
    (directory / ".mine.tmp").touch()
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITING, str(directory), "a"], stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        parts = [s.stdout.readline().decode().strip() for s in servers if s.stdout]
        # A locked part stays, however old: a disk may be slow.
        os.utime(directory / parts[0], (0, 0))
        make_store()
        assert {path.name for path in directory.iterdir()} == {*parts, *others}
        servers[0].kill()
        servers[0].wait()
        make_store()
        assert {path.name for path in directory.iterdir()} == {parts[1], *others}
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    assert linked.exists()


def test_without_locks_only_old_parts_are_removed(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    directory = tmp_path / "prefixes"
    directory.mkdir()
    old, new = directory / f".a.{TOKEN}.tmp", directory / f".b.{TOKEN}.tmp"
    for path, age in ((old, 10_000), (new, 1)):
        path.write_text("x")
        os.utime(path, (time.time() - age,) * 2)
    store = make_store()
    assert list(directory.iterdir()) == [new]
    put_all(store, evicted_node(PROMPT))
    assert len(stored_files(store)) == 1


def test_parts_being_written_survive_servers_that_start(tmp_path: Path) -> None:
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


def test_a_full_disk_does_not_end_the_writer_thread(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, write = make_store(), store_files.write_node
    tries = 0

    def fail(file: Any, node: SavedNode) -> int:
        nonlocal tries
        tries += 1
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_files, "write_node", fail)
    with caplog.at_level(logging.WARNING):
        put_all(store, evicted_node(PROMPT))
        # For a while nothing is tried, also what had been queued.
        assert not store.put(evicted_node([7, *PROMPT]))
        assert store.save_all([evicted_node([8, *PROMPT])], 100.0) == 0
    assert (tries, store.stats.failed, store.stats.dropped) == (1, 1, 2)
    assert len(caplog.records) == 1
    monkeypatch.setattr(store._writer, "_paused_until", 0.0)
    monkeypatch.setattr(store_files, "write_node", write)
    put_all(store, evicted_node(PROMPT))
    assert len(store) == 1
    assert_consistent(store)


def test_what_is_queued_behind_a_refused_file_is_dropped(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gate = make_store(), threading.Event()

    def fail(file: Any, node: SavedNode) -> int:
        assert gate.wait(5)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store_files, "write_node", fail)
    assert all(store.put(evicted_node([number, *PROMPT])) for number in range(4))
    gate.set()
    assert store.flush(5)
    assert (store.stats.failed, store.stats.dropped) == (1, 3)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_disk_below_the_budget_new_files_replace_old_ones(
    number: int,
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, write = make_store(), store_files.write_node
    put_all(store, evicted_node([0, *PROMPT]))
    capacity = store.nbytes * 7 // 2

    def write_within(file: Any, node: SavedNode) -> int:
        if store.nbytes + node.head.nbytes > capacity:
            file.write(b"half")
            raise OSError(number, os.strerror(number))
        return write(file, node)

    monkeypatch.setattr(store_files, "write_node", write_within)
    prompts = [[first, *PROMPT] for first in range(10)]
    put_all(store, *(evicted_node(prompt) for prompt in prompts))
    assert [bool(store.find(prompt, 0)) for prompt in prompts] == [False] * 7 + [True] * 3
    assert (store.stats.failed, store.stats.dropped, store.stats.evicted) == (0, 0, 7)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert_consistent(store)
    # A file that could not fit, whatever is removed, removes nothing.
    put_all(store, evicted_node(list(range(300))))
    assert (store.stats.failed, len(store)) == (1, 3)
    assert_consistent(store)


def test_servers_that_share_a_directory(make_store: MakeStore) -> None:
    one = make_store()
    put_all(one, evicted_node(PROMPT))
    budget = 5 * one.nbytes
    stores = [make_store(budget), make_store(budget)]
    errors: list[BaseException] = []

    def serve(store: PrefixStore, seed: int) -> None:
        # MLX's streams belong to threads.
        with mx.stream(mx.new_stream(mx.cpu)):
            try:
                for i in range(60):
                    prompt = [(seed * i) % 9, *PROMPT]
                    store.put(evicted_node(prompt))
                    for snapshot in load_all(store, store.find(prompt, 0)):
                        piece = snapshot.layers[0]
                        assert isinstance(piece, KVPiece)
                        assert mx.array_equal(piece.keys, kv_piece(prompt).keys)
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
        assert_consistent(store)


def test_files_of_another_server_are_found_by_a_rescan(make_store: MakeStore) -> None:
    first, second = make_store(), make_store()
    put_all(first, evicted_node(PROMPT))
    assert second.find(PROMPT, 0) == []
    second._files.rescan()
    assert found_spans(second, PROMPT, 0) == [(0, 30)]
    stored_files(first)[0].unlink()
    second._files.rescan()
    assert len(second) == 0


def test_only_the_owner_can_read_the_directory(make_store: MakeStore) -> None:
    store = make_store()
    put_all(store, evicted_node(PROMPT))
    assert store._files.directory.stat().st_mode & 0o777 == 0o700
    assert stored_files(store)[0].stat().st_mode & 0o777 == 0o600
