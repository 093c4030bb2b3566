"""Shows progress on stderr: a bar on a terminal, else a line every half minute and at the end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import TracebackType
from typing import Never, Self

from tqdm import tqdm

from chairlift.loadtest.bench.metrics import Reply

_TERMINAL_PERIOD = 0.3
_LOG_PERIOD = 30.0


class Progress:
    """Counts a run's finished work and shows it on stderr during the ``async with``.

    A separate task shows it, so that a hanging server is visible and clients only increase
    counters.

    Args:
        total: the number of units; None if the run ends after a time instead.
        what: the name of the run.
        unit: the name of the units.
        shown: whether to show anything.
    """

    def __init__(
        self, total: int | None, what: str, *, unit: str = "requests", shown: bool = True
    ) -> None:
        self.total = total
        self.what = what
        self.unit = unit
        self.done = 0
        self.failed = 0
        self.cancelled = 0
        self.chunks = 0
        self._shown = shown
        self._started = time.perf_counter()
        self._bar: tqdm[Never] | None = None
        self._task: asyncio.Task[None] | None = None

    def add_chunk(self, now: float) -> None:
        """Counts a chunk with a token, which arrived at ``now``."""
        self.chunks += 1

    def add_done(self) -> None:
        """Counts one finished ``unit``."""
        self.done += 1

    def add_reply(self, reply: Reply) -> None:
        """Counts a finished request."""
        self.done += 1
        self.failed += bool(reply.error)
        self.cancelled += reply.cancelled

    async def __aenter__(self) -> Self:
        self._started = time.perf_counter()
        if self._shown:
            if sys.stderr.isatty():
                self._bar = tqdm(
                    total=self.total, desc=self.what, unit=f" {self.unit}", file=sys.stderr
                )
            self._task = asyncio.create_task(self._show_periodically())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self.done or kind is None:
            self._show()
        if self._bar is not None:
            self._bar.close()

    async def _show_periodically(self) -> None:
        while True:
            await asyncio.sleep(_LOG_PERIOD if self._bar is None else _TERMINAL_PERIOD)
            self._show()

    def _show(self) -> None:
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        details = [f"{self.chunks / elapsed:.0f} chunks/s"] if self.chunks else []
        for count, name in ((self.failed, "failed"), (self.cancelled, "cancelled")):
            if count:
                details.append(f"{count} {name}")
        if self._bar is None:
            done = self.done if self.total is None else f"{self.done}/{self.total}"
            rate = f"{self.done / elapsed:.1f} {self.unit}/s"
            line = ", ".join([f"{done} {self.unit} in {elapsed:.0f} s", rate, *details])
            print(f"{self.what}: {line}", file=sys.stderr, flush=True)
        else:
            self._bar.n = self.done
            self._bar.set_postfix_str(", ".join(details))
