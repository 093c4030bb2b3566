"""Responses that may be asked for again or gone on from, for a while and up to so many bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from chairlift.api.errors import UnknownItem, UnknownResponse
from chairlift.api.responses.items import Item
from chairlift.api.responses.replies import Response

# What an entry takes beside its JSON, about; it bounds the number of small ones.
ENTRY_BYTES = 1024
# And each item's id, by which it is found.
ITEM_BYTES = 256

_items = msgspec.json.Decoder(list[Item])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and a JSON list of all items that lead to it: the conversation before,
    and its input. ``item_ids`` are those by which a request may refer to its items."""

    id: str
    reply: bytes
    inputs: bytes
    item_ids: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The bytes that it counts."""
        ids = len(self.item_ids) * ITEM_BYTES
        return len(self.reply) + len(self.inputs) + ids + ENTRY_BYTES

    def input_items(self) -> list[Item]:
        """The items that lead to it."""
        return _items.decode(self.inputs)

    def conversation(self) -> list[Item]:
        """The items that lead to it, and its own."""
        return [*self.input_items(), *msgspec.json.decode(self.reply, type=Response).output]


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredResponse
    expiry: asyncio.TimerHandle


class _Shelf:
    """What one account has stored, the oldest first; ``holders`` are by an item's id the responses
    that hold it, the oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.holders: dict[str, list[str]] = {}
        self.size = 0

    def add(self, entry: _Entry) -> None:
        self.entries[entry.stored.id] = entry
        self.size += entry.stored.size
        for item_id in entry.stored.item_ids:
            self.holders.setdefault(item_id, []).append(entry.stored.id)

    def remove(self, response_id: str) -> None:
        entry = self.entries.pop(response_id)
        entry.expiry.cancel()
        self.size -= entry.stored.size
        for item_id in entry.stored.item_ids:
            holders = self.holders[item_id]
            holders.remove(response_id)
            if not holders:
                del self.holders[item_id]


class ResponseStore:
    """Keeps each response for ``seconds``, and all of them in ``most_bytes`` (0 keeps none).

    They belong to the account that made them. Where room is short, the account that has stored the
    most loses its oldest.
    """

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self.most_bytes = most_bytes
        self._seconds = seconds
        self._shelves: dict[str, _Shelf] = {}

    @property
    def size(self) -> int:
        """The bytes that all of them count."""
        return sum(shelf.size for shelf in self._shelves.values())

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Stores a response, if it is not larger than all there may be."""
        if stored.size > self.most_bytes:
            return
        while self.size + stored.size > self.most_bytes:
            largest = max(self._shelves.values(), key=lambda shelf: shelf.size)
            largest.remove(next(iter(largest.entries)))
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._seconds, self._expire, owner, stored.id)
        self._shelves.setdefault(owner, _Shelf()).add(_Entry(stored, expiry))

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """A response of this owner.

        Raises:
            UnknownResponse: it has none of that id, or has it no more.
        """
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(response_id)
        if entry is None:
            raise UnknownResponse(f"Response with id '{response_id[:256]}' not found.")
        return entry.stored

    def holding(self, owner: str, item_ids: Iterable[str]) -> list[StoredResponse]:
        """The owner's responses that hold all these items, each once: of each item the newest.

        Raises:
            UnknownItem: no response of this owner holds one of them.
        """
        shelf = self._shelves.get(owner, _Shelf())
        found: dict[str, StoredResponse] = {}
        for item_id in item_ids:
            if item_id not in shelf.holders:
                raise UnknownItem(f"Item with id '{item_id}' not found.", "input")
            newest = shelf.holders[item_id][-1]
            found[newest] = shelf.entries[newest].stored
        return list(found.values())

    def delete(self, owner: str, response_id: str) -> None:
        """Forgets a response.

        Raises:
            UnknownResponse: as ``get``.
        """
        self.get(owner, response_id)
        self._shelves[owner].remove(response_id)

    def _expire(self, owner: str, response_id: str) -> None:
        self._shelves[owner].remove(response_id)


RESPONSE_STORE: web.AppKey[ResponseStore] = web.AppKey("response_store", ResponseStore)
