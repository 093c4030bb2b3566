"""Collects the state for the page at ``/``: batch, queue, throughput, memory, recent requests.

While no page is open, a step costs one assignment and a request one set entry.
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

# The interval at which each watcher gets a snapshot.
PERIOD_SECONDS = 0.5
MAX_WATCHERS = 16
# The span of latencies and prefix hits.
WINDOW_SECONDS = 60.0
# The span of throughput, longer than a step.
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
    """A choice that is generating; the page draws it as a rider.

    ``id`` is derived from the completion's id.
    """

    id: str
    tokens: int


class Latency(msgspec.Struct):
    """Percentiles over WINDOW_SECONDS, in seconds."""

    p50: float
    p95: float
    p99: float


class KVMemory(msgspec.Struct):
    """KV memory in bytes.

    Attributes:
        used: used by tokens in the rows' buffers.
        reserved: reserved for rows.
        prefixes: used by cached prefixes.
        limit: the limit of all rows together.
    """

    used: int
    reserved: int
    prefixes: int
    limit: int


class PrefixQueries(msgspec.Struct):
    """Prompt tokens over WINDOW_SECONDS: looked up in the prefix cache, and found there."""

    queried: int
    hit: int


class RecentRequest(msgspec.Struct):
    """An ended request, without any text of the client.

    Attributes:
        id: the completion's id, or None if nothing was generated.
        route: the route's pattern.
        status: the HTTP status.
        seconds: the duration of the request.
        ago: seconds since its end.
        prompt_tokens: the number of prompt tokens.
        cached_tokens: the number of prompt tokens that came from the prefix cache.
        output_tokens: the number of output tokens.
        first_token: seconds from arrival to the first token.
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
    """One event of the page's stream.

    Attributes:
        status: whether requests can be served.
        reason: why requests cannot be served now, or None.
        model: the served model, or None while it is loading.
        running: the number of rows in the batch, including prefilling ones.
        waiting: the number of waiting choices.
        riders: the users' choices that are generating.
        generated_pace: output tokens a second.
        prefilled_pace: prompt tokens computed a second.
        ttft: times to first token, or None if there were none.
        itl: inter-token latencies, or None if there were none.
        kv: KV memory.
        prefixes: use of the prefix cache.
        requests: requests that ended recently, latest first.
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
    """The server's state that the page shows."""

    @property
    def loaded(self) -> LiveModel | None:
        """The model, or None while it is loading."""
        ...

    @property
    def unhealthy(self) -> str | None:
        """The reason why requests cannot be served now, or None."""
        ...


class _Watched:
    """Statistics that are collected only while a page is open."""

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
    """Records steps and requests for the open pages. ``closing`` is set when the server stops."""

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
        """Records a request of a route that does work, after it has ended or was refused."""
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
        """Counts an open page until the ``with`` block ends.

        Raises:
            TooManyWatchers: ``MAX_WATCHERS`` pages are open already.
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
        # If the page has just been opened, less time than PACE_SECONDS has been recorded.
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
            self.riders,
            pace[_GENERATED] / seconds,
            pace[_PREFILLED] / seconds,
            _latency(watched.ttft, now),
            _latency(watched.itl, now),
            KVMemory(stats.kv_used_bytes, stats.kv_reserved_bytes, stats.prefix_bytes, limit),
            PrefixQueries(prefixes[_QUERIED], prefixes[_HIT]),
            [msgspec.structs.replace(request, ago=now - ended) for ended, request in watched.ended],
        )

    @property
    def riders(self) -> list[Rider]:
        """The choices that are being generated."""
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
