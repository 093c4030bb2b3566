"""What the page at ``/`` shows: batch, queue, throughput, memory, and recent requests.

While no page watches, a step costs one assignment and a request one set entry.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import msgspec

from chairlift.api.errors import TooManyWatchers
from chairlift.api.observe.request_record import ObservedGeneration, ObservedModel, RequestRecord
from chairlift.engine.messages import ModelInfo, StepStats
from chairlift.metrics.window import Percentiles, Tally

# How often each watcher gets a snapshot.
PERIOD_SECONDS = 0.5
MAX_WATCHERS = 16
# Latencies and prefix hits cover the last minute; throughput, a span longer than a step.
WINDOW_SECONDS = 60.0
PACE_SECONDS = 5.0
RECENT_REQUESTS = 12

_GENERATED, _PREFILLED, _QUERIED, _HIT = range(4)


class Facts(msgspec.Struct):
    """The served model."""

    name: str
    architecture: str
    dtype: str
    device: str
    max_rows: int
    max_context: int


class Rider(msgspec.Struct):
    """A choice that is generating; ``id`` is derived from the completion's id."""

    id: str
    tokens: int


class Latency(msgspec.Struct):
    """Percentiles over the window, in seconds."""

    p50: float
    p95: float
    p99: float


class KVMemory(msgspec.Struct):
    """Bytes: used by tokens in the rows' buffers, reserved for rows, taken by cached prefixes, and
    the limit of all rows.
    """

    used: int
    reserved: int
    prefixes: int
    limit: int


class PrefixQueries(msgspec.Struct):
    """Prompt tokens looked up in the prefix cache during the window, and those found there."""

    queried: int
    hit: int


class RecentRequest(msgspec.Struct):
    """An ended request, without any text of its client. Times are in seconds.

    ``id``, tokens and times are None if nothing was generated; ``first_token`` is counted from
    the arrival.
    """

    id: str | None
    route: str
    status: int
    seconds: float
    ago: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_token: float | None = None


class LiveState(msgspec.Struct):
    """One event. ``reason`` says why requests cannot be served now.

    ``running`` counts the rows of the batch, prefilling ones included; ``riders`` are the users'
    generating choices. Paces are tokens a second.
    """

    status: Literal["ok", "unavailable"]
    reason: str | None
    model: Facts | None
    running: int
    waiting: int
    riders: list[Rider]
    generated_pace: float
    prefilled_pace: float
    ttft: Latency | None
    itl: Latency | None
    kv: KVMemory
    prefixes: PrefixQueries
    requests: list[RecentRequest]


class LiveModel(ObservedModel, Protocol):
    """The model that the page shows."""

    @property
    def info(self) -> ModelInfo: ...


class ServerStatus(Protocol):
    """What the page asks the server: its model, and why it cannot serve now, if it cannot."""

    @property
    def loaded(self) -> LiveModel | None: ...
    @property
    def unhealthy(self) -> str | None: ...


class _Watched:
    """Statistics that are gathered only while a page watches."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.ttft = Percentiles(WINDOW_SECONDS)
        self.itl = Percentiles(WINDOW_SECONDS)
        self.pace = Tally(PACE_SECONDS, slot=PERIOD_SECONDS)
        self.prefixes = Tally(WINDOW_SECONDS)
        self.ended: deque[tuple[float, RecentRequest]] = deque(maxlen=RECENT_REQUESTS)

    def add_step(self, stats: StepStats) -> None:
        now = time.monotonic()
        first, following = stats.first_token_latencies, stats.inter_token_latencies
        self.ttft.add(first, now)
        self.itl.add(following, now)
        self.pace.add_many(_GENERATED, len(first) + len(following), now)
        self.pace.add_many(_PREFILLED, stats.prefill_tokens, now)
        self.prefixes.add_many(_QUERIED, stats.prefix_queries, now)
        self.prefixes.add_many(_HIT, stats.prefix_hits, now)

    def add_request(self, record: RequestRecord) -> None:
        request = RecentRequest(None, record.route, record.status, record.seconds, 0.0)
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
        self.ended.appendleft((record.ended, request))


class Live:
    """Records steps and requests for watchers. ``closing`` is set when the server stops."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self._latest = StepStats()
        self._open: set[ObservedGeneration] = set()
        self._watchers = 0
        self._watched: _Watched | None = None

    def record_step(self, stats: StepStats) -> None:
        """Records an engine step."""
        self._latest = stats
        if self._watched is not None:
            self._watched.add_step(stats)

    def record_request(self, record: RequestRecord) -> None:
        """Records a request that does work and has ended or was refused."""
        if self._watched is not None:
            self._watched.add_request(record)

    @contextmanager
    def riding(self, generation: ObservedGeneration) -> Iterator[None]:
        """Shows the request as generating until the ``with`` block ends."""
        self._open.add(generation)
        try:
            yield
        finally:
            self._open.discard(generation)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts a watcher until the ``with`` block ends.

        Raises:
            TooManyWatchers: there are ``MAX_WATCHERS`` already.
        """
        if self._watchers == MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} pages watch this server already")
        self._watchers += 1
        self._watched = self._watched or _Watched()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched = None

    def snapshot(self, server: ServerStatus) -> LiveState:
        """The current snapshot. Call it only inside ``watching``."""
        watched, stats, now = self._watched, self._latest, time.monotonic()
        assert watched is not None
        pace, prefixes = watched.pace.counts(now), watched.prefixes.counts(now)
        # A page just opened has not watched for a whole window yet.
        seconds = max(PERIOD_SECONDS, min(PACE_SECONDS, now - watched.since))
        model = server.loaded
        reason = server.unhealthy
        limit = 0 if model is None else model.info.kv_limit_bytes
        return LiveState(
            "ok" if reason is None else "unavailable",
            reason,
            None if model is None else _facts(model),
            stats.running,
            stats.waiting,
            self._riders(),
            pace[_GENERATED] / seconds,
            pace[_PREFILLED] / seconds,
            _latency(watched.ttft, now),
            _latency(watched.itl, now),
            KVMemory(stats.kv_used_bytes, stats.kv_reserved_bytes, stats.prefix_bytes, limit),
            PrefixQueries(prefixes[_QUERIED], prefixes[_HIT]),
            [msgspec.structs.replace(request, ago=now - ended) for ended, request in watched.ended],
        )

    def _riders(self) -> list[Rider]:
        return [
            Rider(f"{generation.id[-8:]}-{choice.index}", choice.tokens)
            for generation in self._open
            for choice in generation.choices
            if choice.tokens and choice.finish is None
        ]


def _facts(model: LiveModel) -> Facts:
    info = model.info
    return Facts(
        model.name, info.architecture, info.dtype, info.device, info.max_rows, info.max_context
    )


def _latency(values: Percentiles, now: float) -> Latency | None:
    found = values.at((0.5, 0.95, 0.99), now)
    return None if found is None else Latency(*found)
