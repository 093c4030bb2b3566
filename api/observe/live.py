"""Collects the state for the page at ``/``: batch, queue, throughput, memory, requests, history.

All of it is recorded whether a page is open or not, and snapshots are made only for open pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec
from aiohttp import web

from chairlift.api.errors import TooManyWatchers
from chairlift.api.observe.history import INTERVAL_SECONDS, History, Moment
from chairlift.api.observe.live_state import (
    Facts,
    KVUsage,
    Latency,
    LiveState,
    ModelState,
    PrefixQueries,
    RecentRequest,
    Rider,
)
from chairlift.api.observe.request_record import ObservedGeneration, ObservedModel, RequestRecord
from chairlift.engine.messages import ModelInfo, StepStats
from chairlift.metrics.quantiles import Quantiles

# The interval at which each watcher gets a snapshot.
PERIOD_SECONDS = 0.5
MAX_WATCHERS = 16
RECENT_REQUESTS = 12


class LiveModel(ObservedModel, Protocol):
    """The model that the page shows."""

    @property
    def info(self) -> ModelInfo: ...


class ServerStatus(Protocol):
    """The server's state that the page shows."""

    @property
    def loaded_models(self) -> Sequence[LiveModel]:
        """The models that are loaded."""
        ...

    @property
    def model_states(self) -> Mapping[str, str]:
        """The state of every model, by name."""
        ...

    @property
    def vision_models(self) -> Container[str]:
        """The names of the models that take images, as far as they were loaded once."""
        ...

    @property
    def unhealthy(self) -> str | None:
        """The reason why requests cannot be served now, or None."""
        ...


class Live:
    """Records steps and requests for the page.

    Attributes:
        closing: set when the server stops.
        history: the last fifteen minutes.
    """

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.history = History(Moment.now())
        self._open: set[ObservedGeneration] = set()
        self._ended: deque[tuple[float, RecentRequest]] = deque(maxlen=RECENT_REQUESTS)
        self._watchers = 0

    def record_step(self, stats: StepStats, model: str = "") -> None:
        """Records a step of the model's engine."""
        self.history.add_step(stats, model)

    def forget_steps(self, model: str) -> None:
        """Forgets the state of a model that was unloaded."""
        self.history.forget_steps(model)

    def record_restart(self) -> None:
        """Records a restart of the engine."""
        self.history.current.restarts += 1

    def record_request(self, record: RequestRecord) -> None:
        """Records a request of a route that does work, after it has ended or was refused."""
        self.history.current.requests += 1
        self.history.current.failed += record.outcome == "failed"
        self._ended.appendleft((record.ended, _recent(record)))

    @contextmanager
    def riding(self, generation: ObservedGeneration) -> Iterator[None]:
        """Shows the request as generating until the ``with`` block ends."""
        self._open.add(generation)
        try:
            yield
        finally:
            self._open.discard(generation)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Counts an open page until the ``with`` block ends.

        Raises:
            TooManyWatchers: ``MAX_WATCHERS`` pages are open already.
        """
        if self._watchers == MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} pages watch this server already")
        self._watchers += 1
        try:
            yield Watcher(self)
        finally:
            self._watchers -= 1

    @property
    def riders(self) -> list[Rider]:
        """The choices that are being generated."""
        now = time.monotonic()
        return [
            Rider(f"{generation.id[-8:]}-{choice.index}", choice.tokens, round(seconds, 1))
            for generation in self._open
            for seconds in [now - min((t.arrival for t in generation.times), default=now)]
            for choice in generation.choices
            if choice.tokens and choice.finish is None
        ]

    @property
    def recent(self) -> list[RecentRequest]:
        """The requests that ended recently, latest first."""
        now = time.monotonic()
        return [msgspec.structs.replace(each, ago=now - ended) for ended, each in self._ended]


class Watcher:
    """An open page: it gets every sample of the history once."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._samples_sent = 0

    def snapshot(self, server: ServerStatus) -> LiveState:
        """The current snapshot."""
        now = Moment.now()
        history = self._live.history
        samples, self._samples_sent = history.since(self._samples_sent)
        minute, stats = history.last_minute(now), history.latest
        models, vision = server.loaded_models, server.vision_models
        reason = server.unhealthy
        return LiveState(
            now.at,
            samples,
            "ok" if reason is None else "unavailable",
            reason,
            _facts(models),
            [
                ModelState(name, state, name in vision)
                for name, state in server.model_states.items()
            ],
            stats.running,
            stats.waiting,
            self._live.riders,
            *history.paces(now),
            _latency(minute.ttft),
            _latency(minute.itl),
            KVUsage(
                *(stats.kv_used_bytes, stats.kv_reserved_bytes, stats.prefix_bytes),
                _kv_limit(models),
            ),
            PrefixQueries(minute.prefix_queries, minute.prefix_hits),
            self._live.recent,
        )


def history_recording(
    live: Live, server: ServerStatus
) -> Callable[[web.Application], AsyncIterator[None]]:
    """A cleanup context that makes the history's samples while the application runs."""

    async def record(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_end_intervals(live, server))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return record


async def _end_intervals(live: Live, server: ServerStatus) -> None:
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        kv_limit = _kv_limit(server.loaded_models)
        live.history.end_interval(Moment.now(), server.unhealthy is None, kv_limit)


def _recent(record: RequestRecord) -> RecentRequest:
    request = RecentRequest(
        None, record.route, record.status, record.outcome, record.seconds, ago=0.0
    )
    if (generation := record.generation) is not None:
        usage = generation.usage()
        request.id = generation.id
        request.prompt_tokens = usage.prompt_tokens
        request.cached_tokens = usage.prompt_tokens_details.cached_tokens
        request.output_tokens = usage.completion_tokens
        times = ((t.prefill_times, t.arrival) for t in generation.times)
        request.first_token = min(
            (prefill.first_token - arrival for prefill, arrival in times if prefill),
            default=None,
        )
    return request


def _facts(models: Sequence[LiveModel]) -> Facts | None:
    """The facts of the first model, with the rows of all."""
    if not models:
        return None
    first, info = models[0], models[0].info
    rows = sum(model.info.max_rows for model in models)
    return Facts(first.name, info.architecture, info.dtype, info.device, rows, info.max_context)


def _kv_limit(models: Sequence[LiveModel]) -> int:
    return sum(model.info.kv_limit_bytes for model in models)


def _latency(values: Quantiles) -> Latency | None:
    found = values.at((0.5, 0.95, 0.99))
    return None if found is None else Latency(*found)
