"""An event loop whose clock jumps to the next timer, so that hours pass in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = self._scheduled  # type: ignore[attr-defined]
            times = [timer.when() for timer in timers if not timer.cancelled()]
            self._now = max(self._now, min(times, default=0.0))
        super()._run_once()  # type: ignore[misc]


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end; timers cost no time. Nothing in it may wait for a thread."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
