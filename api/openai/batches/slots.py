"""Bounds the choices that all batches generate at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Other requests end without a notice.
POLL_SECONDS = 0.1


class Slots:
    """Slots for choices, which batches get in the order in which they ask.

    Batches fill rows that no other request needs: a request waits until the engine has a free row
    for each of its choices. One request of all batches runs in any case, so that they advance on a
    busy server, too.

    Args:
        limit: returns the maximum number of choices of all batches.
        free_rows: returns the number of rows that the engine has left.
    """

    def __init__(self, limit: Callable[[], int], free_rows: Callable[[], int]) -> None:
        self._limit = limit
        self._free_rows = free_rows
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self.used = 0

    def slot(self, choices: int) -> Slot:
        """The slots of one request, which are not taken yet."""
        return Slot(self, choices)

    async def acquire(self, choices: int) -> None:
        """Waits for this many slots. ``Slot`` calls it."""
        async with self._turn:
            while not self._has_room(choices):
                self._released.clear()
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._released.wait()
                except TimeoutError:
                    continue
            self.used += choices

    def release(self, choices: int) -> None:
        """Releases this many slots. ``Slot`` calls it."""
        self.used -= choices
        self._released.set()

    def _has_room(self, choices: int) -> bool:
        if not self.used:
            return True
        return self.used + choices <= self._limit() and choices <= self._free_rows()


class Slot:
    """The slots of one request. ``take`` and ``release`` may alternate."""

    def __init__(self, slots: Slots, choices: int) -> None:
        self._slots = slots
        self._choices = choices
        self._is_taken = False

    async def take(self) -> None:
        """Waits until the slots are free, and takes them."""
        await self._slots.acquire(self._choices)
        self._is_taken = True

    def release(self) -> None:
        """Releases the slots if they are taken."""
        if self._is_taken:
            self._is_taken = False
            self._slots.release(self._choices)
