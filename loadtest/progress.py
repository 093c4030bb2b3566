"""The live line: a bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import TracebackType
from typing import Never, Self

from tqdm import tqdm

_TERMINAL_PERIOD = 0.3
_LOG_PERIOD = 5.0


class Progress:
    """Counts what a run has done so far and shows it on stderr while the ``async with`` lasts.

    A task of its own shows it, so that a server that hangs is seen to hang, and the clients only
    ever add to a counter.
    """

    def __init__(self, total: int, what: str, *, shown: bool = True) -> None:
        self.total = total
        self.what = what
        self.done = 0
        self.failed = 0
        self.chunks = 0
        self._shown = shown
        self._started = time.perf_counter()
        self._bar: tqdm[Never] | None = None
        self._task: asyncio.Task[None] | None = None

    def add_chunk(self, now: float) -> None:
        """A chunk with a token came in, at ``now``."""
        self.chunks += 1

    def add_done(self, *, ok: bool) -> None:
        """A request ended."""
        self.done += 1
        self.failed += not ok

    async def __aenter__(self) -> Self:
        self._started = time.perf_counter()
        if self._shown:
            if sys.stderr.isatty():
                self._bar = tqdm(total=self.total, desc=self.what, unit="req", file=sys.stderr)
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
        self._show()
        if self._bar is not None:
            self._bar.close()

    async def _show_periodically(self) -> None:
        while True:
            await asyncio.sleep(_LOG_PERIOD if self._bar is None else _TERMINAL_PERIOD)
            self._show()

    def _show(self) -> None:
        elapsed = time.perf_counter() - self._started
        rate = f"{self.chunks / elapsed:.0f} chunks/s" if elapsed > 0 else ""
        failed = f", {self.failed} failed" if self.failed else ""
        if self._bar is None:
            counts = f"{self.done}/{self.total} requests in {elapsed:.0f} s"
            print(f"{self.what}: {counts}, {rate}{failed}", file=sys.stderr, flush=True)
        else:
            self._bar.n = self.done
            self._bar.set_postfix_str(rate + failed)
