"""A fair queue: clients take turns, however many jobs each of them has."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """A queue whose owners take turns; the entries of each owner stay in order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._waiting.values())

    def entries(self, owner: str | None = None) -> list[T]:
        """The entries of one owner, or of all."""
        if owner is not None:
            return list(self._waiting.get(owner, ()))
        return [entry for entries in self._waiting.values() for entry in entries]

    def put(self, owner: str, entry: T) -> None:
        """Appends an entry."""
        self._waiting.setdefault(owner, deque()).append(entry)

    def take(self) -> T:
        """Removes and returns the next entry. The queue must not be empty."""
        owner, entries = self._waiting.popitem(last=False)
        entry = entries.popleft()
        if entries:
            self._waiting[owner] = entries  # to the end of the order
        return entry
