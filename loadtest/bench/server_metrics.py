"""What the server says of itself: its Prometheus metrics, read before, during and after a run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.errors import ServerError

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"

# Fine enough for a plot of a few seconds, and nothing to a server.
_POLL_PERIOD = 0.25


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading: the samples of each name."""

    samples: Mapping[str, list[Sample]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of a name that carry these labels; 0 if there are none."""
        found = self.samples.get(name, [])
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def parse_scrape(text: str) -> Scrape:
    """A reading out of Prometheus' text format.

    Raises:
        ServerError: it is not in that format.
    """
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
    except ValueError as error:
        raise ServerError(f"the server's metrics are not in Prometheus' format: {error}") from error
    return Scrape(samples)


class QueueSample(NamedTuple):
    """Rows that run and requests that wait at ``time``, in seconds of ``time.perf_counter()``."""

    time: float
    running: float
    waiting: float


class QueuePoller:
    """Reads rows and queue a few times a second while the ``async with`` lasts.

    ``samples`` has what was read; a reading that fails is left out.
    """

    def __init__(self, client: OpenAIClient, address: str) -> None:
        self.samples: list[QueueSample] = []
        self._client = client
        self._address = address
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _poll(self) -> None:
        while True:
            with contextlib.suppress(ServerError):
                text = await self._client.fetch(self._address)
                # To parse all of it would cost the clients' processor more than to fetch it.
                lines = [line for line in text.splitlines() if line.startswith((RUNNING, WAITING))]
                scrape = parse_scrape("\n".join(lines) + "\n")
                running, waiting = scrape.total(RUNNING), scrape.total(WAITING)
                self.samples.append(QueueSample(time.perf_counter(), running, waiting))
            await asyncio.sleep(_POLL_PERIOD)
