"""The files of a prefix store: written atomically, verified when read, within a budget.

A file is one node, named by the model, the node's start and a digest of all tokens up to its end.
So servers that share a directory write the same content under the same name.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.saved.layers import SavedLayer, Template
from chairlift.cache.saved.nodes import (
    NodeHead,
    SavedNode,
    node_behind,
    read_head,
    read_node,
    write_node,
)
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.store.index import Entry, Index
from chairlift.cache.store.parts import new_part, remove_abandoned
from chairlift.cache.store.stats import StoreStats

_log = logging.getLogger(__name__)
_NAME = re.compile(
    r"(?P<model>[0-9a-f]{16})-(?P<start>\d{1,10})-(?P<path>[0-9a-f]{40})\.safetensors"
)
_RESCAN_SECONDS = 60.0
# The disk is full, or this user's share of it.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NodeFiles:
    """The files of one model in a directory, which others may share. No MLX.

    One thread writes; any may read.

    Args:
        directory: created if necessary, readable by its owner only. Other files are left alone.
        budget_bytes: maximum bytes of this model's files; the least recently used are removed.
        model: the fingerprint. Other models' files are neither read nor counted.
        template: the required types and shapes of the layers.
        stats: the counters to update.

    Raises:
        OSError: the directory cannot be created or read.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        model: str,
        template: Template | None,
        stats: StoreStats,
    ) -> None:
        self.directory = directory
        self.index = Index()
        self._budget = budget_bytes
        self._model = model
        self._template = template
        self._stats = stats
        self._is_disk_full = False
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_abandoned(directory)
        self.rescan()
        self.make_room(0)

    def read(self, entry: Entry) -> SavedNode | None:
        """Reads and verifies a node; None if its file is missing or corrupt (drops the entry)."""
        path = self.directory / entry.name
        try:
            node = read_node(path, self._model, self._template)
            if not _same(node.head, entry.head):
                raise SavedStateError(f"{path}: its tokens have changed since it was indexed")
        except SavedStateError as error:
            self._give_up(path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        self.index.touch(entry.name)
        return node

    def write(
        self,
        tokens: Sequence[int],
        before: PathDigest,
        start: int,
        layers: tuple[SavedLayer, ...],
    ) -> None:
        """Writes the node of ``tokens``, which follow the first ``start`` tokens of a path, unless
        it exists already or exceeds the budget. If the disk is full below the budget, the least
        recently used files make room for it.

        Raises:
            OSError: it could not be written.
        """
        node = node_behind(self._model, before, tokens, start, layers)
        head, path = node.head, before.continued(tokens).hexdigest()
        name = f"{self._model[:16]}-{head.start}-{path[:40]}.safetensors"
        known = self.index.touch(name)
        if head.start == head.stop or (known and known.head.nbytes >= head.nbytes):
            return
        try:
            self._write(name, node, known)
        except OSError as error:
            # A part may have been written before there was no space: it is removed again.
            if error.errno not in _NO_SPACE or not self._make_space(head.nbytes):
                raise
            self._write(name, node, self.index.touch(name))

    def _write(self, name: str, node: SavedNode, known: Entry | None) -> None:
        with new_part(self.directory, name) as (file, part):
            nbytes = write_node(file, node)
            file.flush()
            if nbytes > self._budget:
                return
            self.make_room(nbytes - (known.nbytes if known else 0))
            os.replace(part, self.directory / name)
        # Copy: a slice would keep all of the path's tokens alive.
        self.index.add(Entry(name, nbytes, replace(node.head, tokens=node.head.tokens.copy())))
        self._stats.written += 1
        self._stats.written_bytes += nbytes

    def _make_space(self, nbytes: int) -> bool:
        """Removes the least recently used files for ``nbytes``; False if all are not enough."""
        if self.index.nbytes < nbytes:
            return False
        if not self._is_disk_full:
            self._is_disk_full = True
            _log.warning(
                "the disk of %s is full with %d bytes of prefixes, below the limit of %d: the "
                "least recently used are removed",
                *(self.directory, self.index.nbytes, self._budget),
            )
        self._remove_beyond(self.index.nbytes - nbytes)
        return True

    def make_room(self, nbytes: int) -> None:
        """Removes the least recently used files until ``nbytes`` more fit the budget."""
        self._remove_beyond(self._budget - nbytes)

    def _remove_beyond(self, limit: int) -> None:
        while (entry := self.index.pop_beyond(limit)) is not None:
            self._stats.evicted += 1
            with suppress(OSError):
                (self.directory / entry.name).unlink()

    def refresh(self) -> None:
        """Looks for other servers' files if the last scan is old. Raises OSError."""
        if time.monotonic() - self._scanned > _RESCAN_SECONDS:
            self.rescan()

    def rescan(self) -> None:
        """Indexes files that are new in the directory and drops entries whose files are gone.

        Raises:
            OSError: the directory cannot be read.
        """
        self._scanned = time.monotonic()
        found: list[tuple[float, str, int]] = []
        with os.scandir(self.directory) as files:
            for file in files:
                parts = _NAME.fullmatch(file.name)
                if parts is None or parts["model"] != self._model[:16]:
                    continue
                with suppress(OSError):
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode):  # reading a pipe would wait for its writer
                        found.append((status.st_mtime, file.name, status.st_size))
        known = self.index.names()
        for name in known - {name for _, name, _ in found}:
            self.index.remove(name)
        for _, name, nbytes in sorted(found):
            if name not in known:
                self._index_file(name, nbytes)

    def _index_file(self, name: str, nbytes: int) -> None:
        """Reads a file's head and adds it to the index."""
        path = self.directory / name
        try:
            head = read_head(path)
        except SavedStateError as error:
            self._give_up(path, error)
            return
        if head.fingerprint == self._model:
            self.index.add(Entry(name, nbytes, head))

    def _give_up(self, path: Path, error: SavedStateError) -> None:
        """Drops a file's entry, and removes the file unless it merely cannot be read."""
        self.index.remove(path.name)
        if isinstance(error.__cause__, OSError):
            if not isinstance(error.__cause__, FileNotFoundError):
                _log.warning("%s", error)
            return
        _log.warning("%s; it is removed", error)
        self._stats.broken += 1
        with suppress(OSError):
            path.unlink()


def _same(first: NodeHead, second: NodeHead) -> bool:
    return (first.salt, first.prefix, first.start) == (
        second.salt,
        second.prefix,
        second.start,
    ) and (np.array_equal(first.tokens, second.tokens))
