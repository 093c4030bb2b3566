"""Long streams for scenarios to watch, and helpers that read metrics and processes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.servers import peers
from chairlift.loadtest.servers.child import ChildServer

START_LIMIT = 300.0
PROMPT_WORDS = 16
_FIRST_TOKEN_LIMIT = 120.0
_POLL_SECONDS = 0.05


def child(model: Path, *flags: str) -> ChildServer:
    """A Chairlift server as a child process, for the duration of a ``with``."""
    spec = peers.ours(model)
    return ChildServer(replace(spec, command=[*spec.command, *flags]), START_LIMIT)


def request(number: int, output_tokens: int) -> WorkloadRequest:
    """A request whose prompt shares no prefix with another."""
    words = [WORDS[(number + step * (number + 1)) % len(WORDS)] for step in range(PROMPT_WORDS)]
    return WorkloadRequest(" ".join(words), PROMPT_WORDS, output_tokens)


@dataclass(slots=True)
class Streams:
    """Streams that run during an ``async with``, which begins once each has its first token.

    Attributes:
        client: the client that sends the requests.
        count: the number of streams.
        output_tokens: maximum output tokens of each.
        tokens: arrival times of all tokens, in ``time.perf_counter()`` seconds.

    Raises:
        ServerError: a stream failed, or did not begin in time.
    """

    client: OpenAIClient
    count: int
    output_tokens: int

    tokens: list[float] = field(default_factory=list)
    _tasks: list[asyncio.Task[Reply]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        begun = [asyncio.Event() for _ in range(self.count)]

        def start(event: asyncio.Event) -> None:
            def on_chunk(now: float) -> None:
                event.set()
                self.tokens.append(now)

            self._tasks.append(
                asyncio.create_task(
                    self.client.complete(request(len(self._tasks), self.output_tokens), on_chunk)
                )
            )

        for event in begun:
            start(event)
        try:
            async with asyncio.timeout(_FIRST_TOKEN_LIMIT):
                while not all(event.is_set() for event in begun):
                    self._check_tasks()
                    await asyncio.sleep(_POLL_SECONDS)
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                raise ServerError("not all streams have begun") from error
            raise
        return self

    def _check_tasks(self) -> None:
        for task in self._tasks:
            if task.done() and (why := task.result().error):
                raise ServerError(f"a stream failed: {why}")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def replies(self) -> list[Reply]:
        """Runs all streams to their ends."""
        return await asyncio.gather(*self._tasks)

    def between(self, start: float, end: float) -> int:
        """The number of tokens that arrived in a time span."""
        return sum(start <= moment < end for moment in self.tokens)


async def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as reply:
        text = await reply.text()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def until_metric(url: str, name: str, value: float, seconds: float, **labels: str) -> float:
    """Waits until a metric has a value or the time is up; returns the metric's last value."""
    deadline = time.monotonic() + seconds
    while True:
        found = await metric(url, name, **labels)
        if found == value or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_SECONDS)


async def drop(task: asyncio.Task[Reply]) -> None:
    """Disconnects the client."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
