"""Stores responses that clients can fetch or continue, for a limited time and in limited memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from chairlift.api.errors import UnknownItem, UnknownResponse
from chairlift.api.responses.replies import StoredResponse


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredResponse
    expiry: asyncio.TimerHandle


class _Shelf:
    """The responses of one account.

    Attributes:
        entries: the stored responses by id, oldest first.
        responses_by_item: maps an item's id to the ids of the responses that contain it, oldest
            first.
        size: bytes of all entries.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.responses_by_item: dict[str, list[str]] = {}
        self.size = 0

    def add(self, entry: _Entry) -> None:
        self.entries[entry.stored.id] = entry
        self.size += entry.stored.size
        for item_id in entry.stored.item_ids:
            self.responses_by_item.setdefault(item_id, []).append(entry.stored.id)

    def remove(self, response_id: str) -> None:
        entry = self.entries.pop(response_id)
        entry.expiry.cancel()
        self.size -= entry.stored.size
        for item_id in entry.stored.item_ids:
            responses = self.responses_by_item[item_id]
            responses.remove(response_id)
            if not responses:
                del self.responses_by_item[item_id]


class ResponseStore:
    """Stores each response for ``seconds``, and all in at most ``max_bytes`` (0 stores none).

    A response belongs to the account that created it. When the store is full, the account with the
    most bytes loses its oldest responses.
    """

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self.max_bytes = max_bytes
        self._seconds = seconds
        self._shelves: dict[str, _Shelf] = {}

    @property
    def size(self) -> int:
        """The bytes of all stored responses."""
        return sum(shelf.size for shelf in self._shelves.values())

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Stores a response, and drops others to make room; does nothing if it is too large."""
        if stored.size > self.max_bytes:
            return
        while self.size + stored.size > self.max_bytes:
            largest = max(self._shelves.values(), key=lambda shelf: shelf.size)
            largest.remove(next(iter(largest.entries)))
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._seconds, self._expire, owner, stored.id)
        self._shelves.setdefault(owner, _Shelf()).add(_Entry(stored, expiry))

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """Returns a response of this owner.

        Raises:
            UnknownResponse: the owner has no response with that id, or it has expired.
        """
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(response_id)
        if entry is None:
            raise UnknownResponse(f"Response with id '{response_id[:256]}' not found.")
        return entry.stored

    def containing(self, owner: str, item_ids: Iterable[str]) -> list[StoredResponse]:
        """Returns, for each item, the owner's newest response with that item; each response once.

        Raises:
            UnknownItem: no response of this owner contains one of the items.
        """
        shelf = self._shelves.get(owner, _Shelf())
        found: dict[str, StoredResponse] = {}
        for item_id in item_ids:
            if item_id not in shelf.responses_by_item:
                raise UnknownItem(f"Item with id '{item_id}' not found.", "input")
            newest = shelf.responses_by_item[item_id][-1]
            found[newest] = shelf.entries[newest].stored
        return list(found.values())

    def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response.

        Raises:
            UnknownResponse: as ``get``.
        """
        self.get(owner, response_id)
        self._shelves[owner].remove(response_id)

    def _expire(self, owner: str, response_id: str) -> None:
        self._shelves[owner].remove(response_id)


RESPONSE_STORE: web.AppKey[ResponseStore] = web.AppKey("response_store", ResponseStore)
