"""Who is being served, and the end of it: nobody new is let in, and those inside may finish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from chairlift.api.admission.deadline import Deadline
from chairlift.api.errors import Draining

# For an error event to be written once a stream's time is up.
FAREWELL_SECONDS = 2.0


class Drain:
    """The requests that are being worked on. ``draining``: the server is about to end."""

    def __init__(self) -> None:
        self.draining = False
        self._open: set[Deadline] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def admit(self, seconds: float | None) -> Iterator[Deadline]:
        """Lets a request in, which is inside as long as the ``with`` lasts.

        Raises:
            Draining: nobody is let in any more.
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
        """Waits until all inside are done, and ends those that are not after ``seconds``.

        Returns how many those were.
        """
        self.draining = True
        await self._emptied(seconds)
        left = list(self._open)
        for deadline in left:
            deadline.end(Draining("the server is stopping and cannot finish this request"))
        await self._emptied(FAREWELL_SECONDS)
        return len(left)

    async def _emptied(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return
