"""The index of a prefix store's files, which finds those that share a prefix with a prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

from chairlift.cache.path_digest import Ids, prefix_digests
from chairlift.cache.saved.nodes import NodeHead


class Entry(NamedTuple):
    """A file of the directory: its name, its bytes, and the head of its node."""

    name: str
    nbytes: int
    head: NodeHead


class FileSegment(NamedTuple):
    """The part of a file that a prompt shares: tokens ``[entry's start, stop)``."""

    entry: Entry
    stop: int


class Index:
    """Entries by name, least recently used first, and by the prefix they follow. Thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._behind: dict[str, set[str]] = {}
        self._starts: dict[str, Counter[int]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> set[str]:
        """The names of all entries."""
        with self._lock:
            return set(self._entries)

    def add(self, entry: Entry) -> None:
        """Adds an entry as the most recently used; it replaces one of the same name."""
        with self._lock:
            self._remove(entry.name)
            head = entry.head
            self._entries[entry.name] = entry
            self._behind.setdefault(head.prefix, set()).add(entry.name)
            self._starts.setdefault(head.salt, Counter())[head.start] += 1
            self.nbytes += entry.nbytes

    def remove(self, name: str) -> None:
        """Removes the entry of that name, if there is one."""
        with self._lock:
            self._remove(name)

    def touch(self, name: str) -> Entry | None:
        """The entry of that name, if any; it counts as just used."""
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)
            return self._entries.get(name)

    def pop_beyond(self, nbytes: int) -> Entry | None:
        """Removes and returns the least recently used entry if all exceed ``nbytes`` together."""
        with self._lock:
            if self.nbytes <= nbytes or not self._entries:
                return None
            entry = next(iter(self._entries.values()))
            self._remove(entry.name)
            return entry

    def on_path(self, salt: str, ids: Ids) -> list[FileSegment]:
        """The usable part of every entry that lies on the path of the tokens.

        Args:
            salt: the salt's digest.
        """
        with self._lock:
            return list(self._on_path(salt, ids))

    def _on_path(self, salt: str, ids: Ids) -> Iterator[FileSegment]:
        starts = sorted(start for start in self._starts.get(salt, ()) if start < len(ids))
        for start, prefix in zip(starts, prefix_digests(salt, ids, starts), strict=True):
            for name in self._behind.get(prefix, ()):
                entry = self._entries[name]
                common = _common(entry.head.tokens, ids[start:])
                if common == len(entry.head.tokens) or (common and entry.head.cuttable):
                    yield FileSegment(entry, start + common)

    def _remove(self, name: str) -> None:
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


def _common(first: Ids, second: Ids) -> int:
    """The length of the common prefix of two arrays."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length
