"""Calls that several callers share."""

from __future__ import annotations

import asyncio
import random

import pytest

from chairlift.engine.errors import GrammarError, QueueFull
from chairlift.engine.workers.shared_calls import SharedCalls


class _Source:
    """Makes calls that wait until they are let go.

    Attributes:
        made: the calls so far.
        cancelled: those that were cancelled.
    """

    def __init__(self) -> None:
        self.made = self.cancelled = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def call(self) -> int:
        self.made += 1
        number = self.made
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return number


async def _started(
    shared: SharedCalls[int], source: _Source, count: int
) -> list[asyncio.Task[int]]:
    callers = [asyncio.create_task(shared.call("a", source.call)) for _ in range(count)]
    await asyncio.sleep(0.01)
    return callers


async def test_callers_at_the_same_time_share_a_call() -> None:
    shared, source = SharedCalls[int](), _Source()
    callers = await _started(shared, source, 9)
    other = asyncio.create_task(shared.call("b", source.call))
    await asyncio.sleep(0)
    source.go.set()
    assert await asyncio.gather(*callers, other) == [1] * 9 + [2]
    assert await shared.call("a", source.call) == 3


async def test_callers_share_an_error() -> None:
    shared, source = SharedCalls[int](), _Source()
    source.error = GrammarError("costly")
    callers = await _started(shared, source, 3)
    source.go.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert results == [source.error] * 3
    assert source.made == 1


@pytest.mark.parametrize("seed", range(8))
async def test_a_call_goes_on_while_any_caller_waits(seed: int) -> None:
    rng, shared, source = random.Random(seed), SharedCalls[int](), _Source()
    callers = await _started(shared, source, 6)
    left = rng.randrange(7)
    for caller in rng.sample(callers, 6 - left):
        caller.cancel()
    await asyncio.sleep(0.01)
    assert source.cancelled == (left == 0)
    source.go.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert results.count(1) == left
    assert await shared.call("a", source.call) == 2


@pytest.mark.parametrize("turns", range(5))
async def test_a_caller_is_not_cancelled_with_those_before_it(turns: int) -> None:
    """However many turns of the event loop later it comes."""
    shared, source = SharedCalls[int](), _Source()
    callers = await _started(shared, source, 2)
    for caller in callers:
        caller.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    later = asyncio.create_task(shared.call("a", source.call))
    await asyncio.sleep(0.01)
    source.go.set()
    assert await later == source.made


async def test_that_another_client_has_too_many_jobs_ends_no_call() -> None:
    shared, source = SharedCalls[int](), _Source()
    source.error = QueueFull("too many", 1.0)
    first, *others = await _started(shared, source, 4)
    source.go.set()
    await asyncio.sleep(0)
    source.error = None
    with pytest.raises(QueueFull):
        await first
    assert await asyncio.gather(*others) == [2] * 3
