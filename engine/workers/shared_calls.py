"""Calls that are made once for all that wait for the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from chairlift.engine.errors import QueueFull

T = TypeVar("T")


@dataclass(slots=True)
class _Call(Generic[T]):
    """A call in progress, and the number of its callers."""

    task: asyncio.Task[T]
    callers: int = 0


class SharedCalls(Generic[T]):
    """Makes each call once at a time; callers that come meanwhile get the same result or error.

    Nothing is remembered afterwards. Use it in one event loop.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[T]] = {}

    async def call(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of a call in progress with an equal ``key``, else of ``make()``.

        The call goes on while any of its callers waits.

        Raises:
            QueueFull: this caller's client has too many jobs. If those of the client that began the
                call are too many, it is made again.
        """
        if call := self._calls.get(key):
            try:
                return await self._result(key, call)
            except QueueFull:
                pass
        if (call := self._calls.get(key)) is None:
            call = self._calls[key] = _Call(asyncio.create_task(make()))
            call.task.add_done_callback(partial(self._end, key, call))
        return await self._result(key, call)

    async def _result(self, key: Hashable, call: _Call[T]) -> T:
        call.callers += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.callers -= 1
            if not call.callers:
                self._forget(key, call)  # a caller that comes now needs another
                call.task.cancel()

    def _end(self, key: Hashable, call: _Call[T], task: asyncio.Task[T]) -> None:
        self._forget(key, call)
        if not task.cancelled():
            task.exception()  # no warning if all callers were cancelled

    def _forget(self, key: Hashable, call: _Call[T]) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]
