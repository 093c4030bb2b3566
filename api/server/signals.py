"""Signal handling of the server process.

SIGTERM and SIGINT stop the server, and SIGHUP reloads its files. It ignores SIGUSR1 and SIGUSR2,
which log rotation sends to servers so that they reopen their logs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


def before_loop() -> None:
    """Sets handlers for the time before ``handled``.

    Stop signals exit at once, because there is nothing to lose yet, and a SIGHUP waits.
    """
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


@contextmanager
def handled(on_stop: Callable[[], None], on_reload: Callable[[], None]) -> Iterator[None]:
    """Makes the running event loop call these handlers.

    After the block, a stop signal ends the process at once, and SIGHUP is ignored.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, on_reload)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        # At its end the event loop would restore the default actions, with other exit codes.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, _interrupt)
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)
