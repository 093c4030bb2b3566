"""A directory of what the prefix cache has dropped: it survives a restart, within a budget.

A file is one node, named by the model, the node's start and a digest of all tokens up to its end:
servers that share a directory write the same thing under the same name, and put it there at once or
not at all. One thread writes; what it is given is memory, and it knows no MLX.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

import numpy as np

from chairlift.cache.container import SavedStateError
from chairlift.cache.prefix import Evicted
from chairlift.cache.saved import (
    NodeHead,
    make_node,
    prefix_digests,
    read_head,
    read_node,
    salt_digest,
    write_node,
)
from chairlift.cache.saved_layers import SavedLayer, Template, pack
from chairlift.cache.snapshot import LayerKind, Snapshot

_log = logging.getLogger(__name__)
_NAME = re.compile(
    r"(?P<model>[0-9a-f]{16})-(?P<start>\d{1,10})-(?P<path>[0-9a-f]{40})\.safetensors"
)
# An integer object and its place in a tuple.
_TOKEN_BYTES = 40
_STALE_SECONDS = 3600.0
_RESCAN_SECONDS = 60.0


class Entry(NamedTuple):
    """A file of the directory: its name, its bytes, and what it is of."""

    name: str
    nbytes: int
    head: NodeHead


class Segment(NamedTuple):
    """The part of a file that a prompt has in common with it: tokens ``[entry's start, stop)``."""

    entry: Entry
    stop: int


class Loaded(NamedTuple):
    """Snapshots read, each to be inserted for the tokens up to its ``stop``; bytes and seconds."""

    snapshots: list[Snapshot]
    nbytes: int
    seconds: float


@dataclass(slots=True)
class StoreStats:
    """Counts since the start. ``dropped`` did not fit the queue, ``failed`` could not be written,
    ``evicted`` went for lack of room, ``broken`` were corrupt and are gone.
    """

    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    evicted: int = 0
    broken: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0


class _Job(NamedTuple):
    tokens: tuple[int, ...]
    salt: str
    start: int
    layers: tuple[SavedLayer, ...]
    nbytes: int


class PrefixStore:
    """Nodes by the tokens that lead to them, in files. For one thread, beside its own.

    Args:
        directory: made if need be, for the owner's eyes only. Other files in it are left alone.
        budget_bytes: the files of this model take no more; what was used least recently goes.
        model: the fingerprint. Files of others are neither read nor counted.
        kinds: what each layer keeps.
        template: what the layers must look like. Better than none: see ``template_of``.
        queue_bytes: how much may wait to be written.

    Raises:
        OSError: the directory cannot be made or read.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        model: str,
        kinds: Sequence[LayerKind],
        template: Template | None = None,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self.stats = StoreStats()
        self.template = template
        self._directory = directory
        self._budget = budget_bytes
        self._model = model
        self._kinds = tuple(kinds)
        self._queue_bytes = queue_bytes
        self._index = _Index()
        self._queue: deque[_Job] = deque()
        self._queued_bytes = 0
        self._busy = self._closed = self._full_was_logged = False
        self._changed = Condition()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_stale()
        self._rescan()
        self._make_room(0)
        self._thread = Thread(target=self._run, name="prefix-store", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of this model's files."""
        return self._index.nbytes

    def put(self, node: Evicted) -> bool:
        """Hands a node to the thread and returns at once, after evaluating it if it was not.

        Returns:
            Whether it was taken; if the queue is full it is not, which is counted.
        """
        return self._put(node, deadline=None)

    def save_all(self, nodes: Iterable[Evicted], timeout: float) -> int:
        """Persists nodes at shutdown, waiting for room in the queue; ``timeout`` is in seconds.

        Returns:
            How many were taken; all of these are written if ``flush`` says so afterwards.
        """
        deadline = time.monotonic() + timeout
        taken = sum(self._put(node, deadline) for node in nodes)
        self.flush(deadline - time.monotonic())
        return taken

    def flush(self, timeout: float) -> bool:
        """Waits until all that was taken is written, at most so many seconds; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float) -> bool:
        """Flushes and ends the thread; whether all was written. Nothing is taken afterwards."""
        done = self.flush(timeout)
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(max(0.1, timeout) if done else 0.1)
        return done

    def find(self, tokens: Sequence[int], position: int, salt: str = "") -> list[Segment]:
        """What extends ``tokens[:position]``, which memory has: segments that reach ever further.

        Each starts no later than the one before it stops. A segment that cannot be cut is only
        found whole. ``tokens`` should be without those that are not to be taken from a cache.
        """
        ids = np.asarray(tokens, "<i4")
        hidden = salt_digest(salt)
        with self._changed:
            found = list(self._index.on_path(hidden, ids))
        chain: list[Segment] = []
        while True:
            near = [s for s in found if s.entry.head.start <= position < s.stop]
            if not near:
                return chain
            chain.append(max(near, key=lambda segment: segment.stop))
            position = chain[-1].stop

    def load(self, segments: Sequence[Segment]) -> Loaded:
        """Reads the segments of ``find``, up to the first that is gone or broken; uses MLX."""
        began = time.perf_counter()
        snapshots: list[Snapshot] = []
        nbytes = 0
        for entry, stop in segments:
            snapshot = self._load(entry)
            if snapshot is None:
                break
            snapshots.append(snapshot.part(snapshot.start, stop))
            nbytes += entry.nbytes
        seconds = time.perf_counter() - began
        self.stats.loaded += len(snapshots)
        self.stats.loaded_bytes += nbytes
        self.stats.load_seconds += seconds
        return Loaded(snapshots, nbytes, seconds)

    def _load(self, entry: Entry) -> Snapshot | None:
        path = self._directory / entry.name
        try:
            node = read_node(path, self._model, self.template)
            if not _same(node.head, entry.head):
                raise SavedStateError(f"{path}: it is not of the tokens it was of")
            snapshot = node.snapshot()
        except SavedStateError as error:
            self._give_up(path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        with self._changed:
            self._index.touch(entry.name)
        return snapshot

    def _give_up(self, path: Path, error: SavedStateError) -> None:
        """Forgets a file, and removes it unless it just cannot be read."""
        with self._changed:
            self._index.remove(path.name)
        if isinstance(error.__cause__, OSError):
            if not isinstance(error.__cause__, FileNotFoundError):
                _log.warning("%s", error)
            return
        _log.warning("%s; it is removed", error)
        self.stats.broken += 1
        with suppress(OSError):
            path.unlink()

    def _put(self, node: Evicted, deadline: float | None) -> bool:
        size = node.snapshot.nbytes + _TOKEN_BYTES * len(node.tokens)
        with self._changed:
            timeout = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
            taken = self._changed.wait_for(lambda: self._closed or self._has_room(size), timeout)
            if self._closed or not taken:
                self._drop(size)
                return False
        try:
            layers = pack(self._kinds, node.snapshot)
        except SavedStateError as error:
            self._fail(error)
            return False
        with self._changed:
            self._queue.append(_Job(node.tokens, node.salt, node.start, layers, size))
            self._queued_bytes += size
            self._changed.notify_all()
        return True

    def _has_room(self, size: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + size <= self._queue_bytes

    def _drop(self, size: int) -> None:
        self.stats.dropped += 1
        if not self._full_was_logged:
            self._full_was_logged = True
            _log.warning(
                "prefixes come faster than %s takes them: %d bytes dropped, as others will be",
                self._directory,
                size,
            )

    def _fail(self, error: Exception) -> None:
        self.stats.failed += 1
        if self.stats.failed == 1:
            _log.warning("a prefix was not saved in %s: %s", self._directory, error)

    # The thread's.

    def _run(self) -> None:
        scanned = time.monotonic()
        while (job := self._next()) is not None:
            try:
                if time.monotonic() - scanned > _RESCAN_SECONDS:
                    self._rescan()
                    scanned = time.monotonic()
                self._write(job)
            except Exception as error:  # a full disk must not end the thread
                self._fail(error)
            with self._changed:
                self._busy = False
                self._queued_bytes -= job.nbytes
                del job
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            self._busy = bool(self._queue)
            return self._queue.popleft() if self._queue else None

    def _write(self, job: _Job) -> None:
        node = make_node(self._model, job.salt, job.tokens, job.start, job.layers)
        head = node.head
        (path,) = prefix_digests(head.salt, np.asarray(job.tokens, "<i4"), [head.stop])
        name = f"{self._model[:16]}-{head.start}-{path[:40]}.safetensors"
        with self._changed:
            known = self._index.touch(name)
        if head.start == head.stop or (known and known.head.nbytes >= head.nbytes):
            return
        part = self._directory / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                nbytes = write_node(file, node)
            if nbytes > self._budget:
                return
            self._make_room(nbytes - (known.nbytes if known else 0))
            os.replace(part, self._directory / name)
        finally:
            part.unlink(missing_ok=True)
        # A slice of the tokens would keep all of them.
        head = replace(head, tokens=head.tokens.copy())
        with self._changed:
            self._index.add(Entry(name, nbytes, head))
        self.stats.written += 1
        self.stats.written_bytes += nbytes

    def _make_room(self, nbytes: int) -> None:
        while True:
            with self._changed:
                if self._index.nbytes + nbytes <= self._budget or not len(self._index):
                    return
                entry = self._index.pop_oldest()
            self.stats.evicted += 1
            with suppress(OSError):
                (self._directory / entry.name).unlink()

    def _rescan(self) -> None:
        """Takes in the files that are new: those found at the start, later those of others."""
        found: list[tuple[float, str, int]] = []
        with os.scandir(self._directory) as files:
            for file in files:
                parts = _NAME.fullmatch(file.name)
                if parts is None or parts["model"] != self._model[:16]:
                    continue
                with suppress(OSError):
                    status = file.stat()
                    found.append((status.st_mtime, file.name, status.st_size))
        with self._changed:
            gone = self._index.names() - {name for _, name, _ in found}
            for name in gone:
                self._index.remove(name)
            known = self._index.names()
        for _, name, nbytes in sorted(found):
            if name not in known:
                self._take_in(name, nbytes)

    def _take_in(self, name: str, nbytes: int) -> None:
        path = self._directory / name
        try:
            head = read_head(path)
        except SavedStateError as error:
            self._give_up(path, error)
            return
        if head.fingerprint == self._model:
            with self._changed:
                self._index.add(Entry(name, nbytes, head))

    def _remove_stale(self) -> None:
        """Removes what servers that were killed left half-written."""
        for path in self._directory.glob(".*.tmp"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()


class _Index:
    """Entries by name, least recently used first, and by where on which prefix they start."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._behind: dict[str, set[str]] = {}
        self._starts: dict[str, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> set[str]:
        return set(self._entries)

    def add(self, entry: Entry) -> None:
        self.remove(entry.name)
        head = entry.head
        self._entries[entry.name] = entry
        self._behind.setdefault(head.prefix, set()).add(entry.name)
        self._starts.setdefault(head.salt, Counter())[head.start] += 1
        self.nbytes += entry.nbytes

    def remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        head = entry.head
        self.nbytes -= entry.nbytes
        self._behind[head.prefix].discard(name)
        if not self._behind[head.prefix]:
            del self._behind[head.prefix]
        starts = self._starts[head.salt]
        starts[head.start] -= 1
        if not starts[head.start]:
            del starts[head.start]
        if not starts:
            del self._starts[head.salt]

    def touch(self, name: str) -> Entry | None:
        """An entry, which then counts as just used."""
        if name in self._entries:
            self._entries.move_to_end(name)
        return self._entries.get(name)

    def pop_oldest(self) -> Entry:
        entry = next(iter(self._entries.values()))
        self.remove(entry.name)
        return entry

    def on_path(self, salt: str, ids: np.typing.NDArray[np.int32]) -> Iterator[Segment]:
        """Every entry that has something in common with the tokens, and how far."""
        starts = sorted(start for start in self._starts.get(salt, ()) if start < len(ids))
        for start, prefix in zip(starts, prefix_digests(salt, ids, starts), strict=True):
            for name in self._behind.get(prefix, ()):
                entry = self._entries[name]
                common = _common(entry.head.tokens, ids[start:])
                if common == len(entry.head.tokens) or (common and entry.head.cuttable):
                    yield Segment(entry, start + common)


def _common(first: np.typing.NDArray[np.int32], second: np.typing.NDArray[np.int32]) -> int:
    """How many tokens two arrays share at their start."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def _same(first: NodeHead, second: NodeHead) -> bool:
    return (first.salt, first.prefix, first.start) == (
        second.salt,
        second.prefix,
        second.start,
    ) and (np.array_equal(first.tokens, second.tokens))
