"""The events of the page's stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from chairlift.api.observe.history import Sample
from chairlift.api.observe.request_record import Outcome


class Facts(msgspec.Struct):
    """The first loaded model, with the rows of all loaded ones."""

    name: str
    architecture: str
    dtype: str
    device: str
    max_rows: int
    max_context: int


class ModelState(msgspec.Struct):
    """One of the server's models.

    Attributes:
        name: its id.
        state: "loaded", "loading", "unloaded", "failed" or so.
        sees: whether it takes images; false until it was loaded once.
    """

    name: str
    state: str
    sees: bool


class Rider(msgspec.Struct):
    """A choice that is generating; the page draws it as a rider.

    Attributes:
        id: derived from the completion's id.
        tokens: its output tokens so far.
        seconds: since its request arrived.
    """

    id: str
    tokens: int
    seconds: float


class Latency(msgspec.Struct):
    """Percentiles over WINDOW_SECONDS, in seconds."""

    p50: float
    p95: float
    p99: float


class KVUsage(msgspec.Struct):
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
        outcome: see ``RequestRecord.outcome``.
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
    outcome: Outcome
    seconds: float
    ago: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_token: float | None = None


class LiveState(msgspec.Struct):
    """One event of the page's stream.

    Attributes:
        now: the time of the event, by the clock of ``Moment.at``.
        history: the samples since the watcher's last event; in its first event, all.
        status: whether requests can be served.
        reason: why requests cannot be served now, or None.
        model: a loaded model, or None while there is none.
        models: all models of the server.
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

    now: float
    history: Sequence[Sample]
    status: Literal["ok", "unavailable"]
    reason: str | None
    model: Facts | None
    models: list[ModelState]
    running: int
    waiting: int
    riders: list[Rider]
    generated_pace: float
    prefilled_pace: float
    ttft: Latency | None
    itl: Latency | None
    kv: KVUsage
    prefixes: PrefixQueries
    requests: list[RecentRequest]
