"""Draining: the server refuses new requests and lets the running ones finish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from chairlift.api.admission.deadline import Deadline
from chairlift.api.errors import Draining

# Time for writing an error event into the streams that are ended.
FAREWELL_SECONDS = 2.0


class Drain:
    """The running requests. ``draining`` is True once the server is stopping."""

    def __init__(self) -> None:
        self.draining = False
        self._open: set[Deadline] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def admit(self, seconds: float | None) -> Iterator[Deadline]:
        """Admits a request, which counts as running until the ``with`` block ends.

        ``seconds`` is its time limit; None means unlimited.

        Raises:
            Draining: the server is about to stop.
        """
        if self.draining:
            raise Draining("the server is about to stop")
        deadline = Deadline(seconds)
        self._open.add(deadline)
        try:
            yield deadline
        finally:
            self._open.discard(deadline)
            self._changed.set()

    async def finish(self, seconds: float) -> int:
        """Refuses new requests, and ends those that still run after ``seconds``.

        Returns the number of requests that were ended.
        """
        self.draining = True
        await self._emptied(seconds)
        unfinished = list(self._open)
        for deadline in unfinished:
            deadline.end(Draining("the server is stopping and cannot finish this request"))
        await self._emptied(FAREWELL_SECONDS)
        return len(unfinished)

    async def _emptied(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return
