"""Runs code that nobody answers for, a model's chat template, beside the loop, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(Exception):
    """The work was not done in its time."""


async def run_limited(work: Callable[[], T], seconds: float) -> T:
    """What ``work`` returns or raises. It runs in a thread of its own, and is ended there.

    Ended between two of Python's bytecodes, that is: a template's loops are made of those.

    Raises:
        TookTooLong: it was not done after ``seconds``.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def body() -> None:
        # The second: this thread may be ended while it tells that it is done.
        with contextlib.suppress(TookTooLong, RuntimeError):
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(tell, None, error)
            else:
                loop.call_soon_threadsafe(tell, result, None)

    thread = threading.Thread(target=body, name="chairlift-limited", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(seconds):
            return await done
    except TimeoutError:
        raise TookTooLong from None
    finally:
        if not done.done() or done.cancelled():
            _end(thread)


def _end(thread: threading.Thread) -> None:
    """Raises TookTooLong in a thread, wherever it is; does nothing to one that has ended."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(TookTooLong)
        )
