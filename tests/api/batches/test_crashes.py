"""The folder after a crash at any write: every committed change is there, once, and nothing else.

A crash is a copy of the folder, taken before an SQL statement or a change of a file, and opened
like any other folder.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from chairlift.api.errors import UnknownBatch, UnknownFile
from chairlift.api.openai.batches.batch_table import BatchTable, Result
from chairlift.api.openai.batches.file_table import FileLimits, FileTable
from chairlift.api.openai.batches.folder import Folder
from chairlift.api.openai.batches.lines import LineResponse, result_line
from chairlift.api.openai.batches.replies import Batch, RequestCounts
from chairlift.api.schemas.paging import Page

LINES = 4
MAX_LINE = 1 << 16
ALL = Page(1000)
# Thousands of folders are copied: in memory, if the machine has such a file system.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass
class Store:
    """An open folder with its tables."""

    folder: Folder
    files: FileTable
    batches: BatchTable

    @classmethod
    def open(cls, path: Path) -> Store:
        folder = Folder(path)
        files = FileTable(folder, FileLimits(1000, 1 << 30))
        return cls(folder, files, BatchTable(folder, files))


@dataclass
class State:
    """What clients can see: each file's content, and each batch's status, results and outputs."""

    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, tuple[str, frozenset[int], tuple[bytes, ...]]] = field(default_factory=dict)


def state_of(store: Store) -> State:
    files, _ = store.files.page("ann", None, ALL)
    inputs = {f.id: store.files.content("ann", f.id).read_bytes() for f in files}
    state = State({f.id: inputs[f.id] for f in files if f.purpose == "batch"})
    outputs = {f.id for f in files} - state.files.keys()
    for batch in store.batches.page("ann", ALL)[0]:
        written = [batch.output_file_id, batch.error_file_id]
        contents = tuple(inputs[file_id] for file_id in written if file_id)
        outputs -= set(written)
        done = frozenset(store.batches.lines_done(batch.id))
        state.batches[batch.id] = batch.status, done, contents
        assert batch.request_counts.completed + batch.request_counts.failed == len(done) or contents
    assert not outputs, "an output file belongs to no batch"
    on_disk = {path.name for path in (store.folder.path / "contents").iterdir()}
    assert on_disk == inputs.keys()
    assert list((store.folder.path / "incoming").iterdir()) == []
    return state


def input_text() -> bytes:
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    return b"".join(
        json.dumps({"custom_id": f"r{n}", **line}).encode() + b"\n" for n in range(1, LINES + 1)
    )


def upload(store: Store) -> str:
    incoming = store.folder.new_incoming()
    incoming.write_bytes(input_text())
    return store.files.upload("ann", "in.jsonl", 3600, incoming).id


def create(store: Store, file_id: str, number: int) -> str:
    batch = Batch(
        id=f"batch_{number}",
        endpoint="/v1/completions",
        model="m",
        input_file_id=file_id,
        completion_window="24h",
        created_at=int(time.time()),
        expires_at=int(time.time()) + 86400,
        metadata={},
        request_counts=RequestCounts(),
    )
    return store.batches.create("ann", batch, 3600).id


def begin(store: Store, batch_id: str) -> None:
    store.batches.change(
        batch_id,
        ("validating",),
        lambda batch: replace(batch, status="in_progress", request_counts=RequestCounts(LINES)),
    )


def result(line: int, failed: bool) -> Result:
    response = LineResponse(400 if failed else 200, "req", Raw(b"{}"))
    return Result(line, failed, result_line(f"r{line}", response))


@contextmanager
def crashes(
    store: Store, monkeypatch: pytest.MonkeyPatch, copy: Callable[[], None]
) -> Iterator[None]:
    """Calls ``copy`` before each SQL statement that writes and each change of a file."""

    def watched(change: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            copy()
            return change(*args, **kwargs)

        return changed

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "unlink")):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        store.folder.database.set_trace_callback(
            lambda statement: None if statement.startswith("SELECT") else copy()
        )
        yield
        store.folder.database.set_trace_callback(None)


OPERATIONS = st.one_of(
    st.just(("upload",)),
    st.tuples(st.just("create"), st.integers(0, 3)),
    st.tuples(st.just("begin"), st.integers(0, 3)),
    st.tuples(
        st.just("results"),
        st.integers(0, 3),
        st.lists(st.tuples(st.integers(1, LINES), st.booleans()), min_size=1, max_size=3),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.integers(0, 3)),
)


def perform(store: Store, operation: Any, number: int) -> None:
    """Performs an operation on one of the files or batches, if it is possible now."""
    state = state_of(store)
    kind, *args = operation
    names = list(state.files if kind in ("create", "delete") else state.batches)
    if kind == "upload":
        upload(store)
        return
    if not names:
        return
    name = names[args[0] % len(names)]
    status = state.batches[name][0] if name in state.batches else ""
    is_unfinished = status in ("validating", "in_progress", "cancelling")
    if kind == "create":
        create(store, name, number)
    elif kind == "begin":
        begin(store, name)
    elif kind == "results" and has_begun(store, name):
        store.batches.add_results(name, [result(*one) for one in args[1]])
    elif kind == "cancel" and status in ("validating", "in_progress"):
        store.batches.cancel("ann", name)
    elif kind == "finish" and is_unfinished:
        store.batches.finish(name, MAX_LINE)
    elif kind == "delete":
        unfinished = {b.batch.input_file_id for b in store.batches.unfinished()}
        if name not in unfinished:
            store.files.delete("ann", name)


def has_begun(store: Store, name: str) -> bool:
    """Whether a batch's requests ever ran; one that is cancelled before has no results."""
    return store.batches.get("ann", name).request_counts.total > 0


def check_outputs(state: State) -> None:
    """Each request of a batch that has ended stands in one of its files, exactly once."""
    for status, done, contents in state.batches.values():
        if contents:
            assert not done, "results become files"
            lines = [json.loads(line) for text in contents for line in text.splitlines()]
            ids = sorted(line["custom_id"] for line in lines)
            assert ids == sorted(f"r{n}" for n in range(1, LINES + 1)), status
        for text in contents:
            ids = [json.loads(line)["custom_id"] for line in text.splitlines()]
            assert len(ids) == len(set(ids))


@pytest.mark.slow
@example([("upload",), ("create", 0), ("cancel", 0)])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(OPERATIONS, min_size=3, max_size=10))
def test_a_crash_at_any_write_loses_nothing_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch, operations: list[Any]
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        root = Path(temporary)
        store = Store.open(root / "files")
        setup = [("upload",), ("create", 0), ("begin", 0)]
        end = [("results", 0, [(1, False), (2, True)]), ("finish", 0)]
        for number, operation in enumerate([*setup, *operations, *end]):
            copies: list[Path] = []

            def copy(copies: list[Path] = copies, number: int = number) -> None:
                copies.append(root / f"{number}-{len(copies)}")
                shutil.copytree(root / "files", copies[-1])

            before = state_of(store)
            with crashes(store, monkeypatch, copy):
                perform(store, operation, number)
            after = state_of(store)
            check_outputs(after)
            for crashed in copies:
                reopened = Store.open(crashed)
                state = state_of(reopened)
                assert state in (before, after), operation
                _work_on(reopened, state)
                reopened.folder.close()
                shutil.rmtree(crashed)
        store.folder.close()


def _work_on(store: Store, state: State) -> None:
    """Ends all batches of a reopened folder; each request is then in exactly one output file."""
    for batch_id, (status, done, _) in state.batches.items():
        if status in ("validating", "in_progress", "cancelling"):
            begin(store, batch_id)
            missing = set(range(1, LINES + 1)) - done
            # A request that was answered before the crash may be answered again.
            store.batches.add_results(batch_id, [result(line, False) for line in missing | done])
            store.batches.finish(batch_id, MAX_LINE)
    ended = state_of(store)
    check_outputs(ended)
    statuses = {status for status, *_ in ended.batches.values()}
    assert statuses <= {"completed", "cancelled", "expired"}


def test_owners_are_apart(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    batch_id = create(store, upload(store), 1)
    assert store.files.page("bob", None, ALL) == ([], False)
    assert store.batches.page("bob", ALL) == ([], False)
    with pytest.raises(UnknownBatch):
        store.batches.get("bob", batch_id)
    with pytest.raises(UnknownFile):
        store.files.get("bob", store.files.page("ann", None, ALL)[0][0].id)
    store.folder.close()


def test_a_content_without_a_file_is_removed(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    file_id = upload(store)
    store.folder.close()
    (tmp_path / "contents" / "stray").write_text("x")
    (tmp_path / "incoming" / "half").write_text("x")
    store = Store.open(tmp_path)
    assert state_of(store).files == {file_id: input_text()}
    store.folder.close()


def test_old_batches_are_forgotten(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    batch_id, running = (create(store, upload(store), number) for number in (1, 2))
    begin(store, batch_id)
    store.batches.finish(batch_id, MAX_LINE)
    store.batches.forget_old(time.time() + 59 * 86400)
    assert len(store.batches.page("ann", ALL)[0]) == 2
    store.batches.forget_old(time.time() + 61 * 86400)
    assert [batch.id for batch in store.batches.page("ann", ALL)[0]] == [running]
    store.folder.close()
