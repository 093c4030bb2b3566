"""A request's time limit, and its early end when the server drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from chairlift.api.errors import TimedOut


class Deadline:
    """The time limit of a request, counted from the creation of this object.

    ``seconds`` None means unlimited. ``arrival`` is the creation in ``time.monotonic()`` seconds.
    """

    def __init__(self, seconds: float | None) -> None:
        self.arrival = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._seconds = seconds
        self._ended: Exception | None = None
        self._timer: asyncio.Timeout | None = None

    @property
    def remaining(self) -> float | None:
        """Seconds until the time limit; None if there is none."""
        if self._seconds is None:
            return None
        return max(0.0, self._began + self._seconds - self._loop.time())

    def tighten(self, seconds: float | None) -> None:
        """Applies the client's own limit if it is smaller."""
        if seconds is not None and (self._seconds is None or seconds < self._seconds):
            self._seconds = seconds

    def end(self, error: Exception) -> None:
        """Ends the request now: ``limit`` cancels its block and raises ``error``."""
        self._ended = error
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self._loop.time())

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancels its block when the time limit has passed.

        Raises:
            TimedOut: the time limit has passed. If ``end`` was called, its error instead.
        """
        when = None if self._seconds is None else self._began + self._seconds
        timer = asyncio.timeout_at(self._loop.time() if self._ended else when)
        try:
            async with timer:
                self._timer = timer
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise self._ended or TimedOut(f"not done within {self._seconds:g} s") from None
        finally:
            self._timer = None


DEADLINE: web.RequestKey[Deadline] = web.RequestKey("deadline", Deadline)
