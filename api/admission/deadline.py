"""When a request must be over, and what ends it sooner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from chairlift.api.errors import TimedOut


class Deadline:
    """Of one request, which arrives now. ``seconds`` None: it may take as long as it does.

    ``arrival`` is in seconds of ``time.monotonic()``.
    """

    def __init__(self, seconds: float | None) -> None:
        self.arrival = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._seconds = seconds
        self._ended: Exception | None = None
        self._timer: asyncio.Timeout | None = None

    def tighten(self, seconds: float | None) -> None:
        """The client's own limit counts where it is the smaller one."""
        if seconds is not None and (self._seconds is None or seconds < self._seconds):
            self._seconds = seconds

    def end(self, error: Exception) -> None:
        """The request is over now: ``limit`` raises ``error``."""
        self._ended = error
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self._loop.time())

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancels what runs in it when the time is up.

        Raises:
            TimedOut: it was; or whatever ``end`` was given.
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
