"""Reads the server's Prometheus metrics before, during and after a run."""

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

# Seconds; fine enough for a plot of a few seconds, and negligible load for a server.
_POLL_PERIOD = 0.25


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of the metrics: the samples by metric name."""

    samples: Mapping[str, list[Sample]]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; 0 if there are none."""
        found = self.samples.get(name, [])
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def parse_scrape(text: str) -> Scrape:
    """Parses Prometheus' text format.

    Raises:
        ServerError: the text is not in that format.
    """
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
    except (ValueError, IndexError) as error:  # IndexError: an unfinished line
        raise ServerError(f"the server's metrics are not in Prometheus' format: {error}") from error
    return Scrape(samples)


class QueueSample(NamedTuple):
    """Running rows and waiting requests at ``time``, in ``time.perf_counter()`` seconds."""

    time: float
    running: float
    waiting: float


class QueuePoller:
    """Samples rows and queue four times a second during the ``async with``.

    Failed readings are missing in ``samples``.
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
                # Parsing all lines would take more of the clients' CPU than fetching them.
                lines = [line for line in text.splitlines() if line.startswith((RUNNING, WAITING))]
                scrape = parse_scrape("\n".join(lines) + "\n")
                running, waiting = scrape.total(RUNNING), scrape.total(WAITING)
                self.samples.append(QueueSample(time.perf_counter(), running, waiting))
            await asyncio.sleep(_POLL_PERIOD)
