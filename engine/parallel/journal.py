"""Rank 0's decisions: all that the next plan depends on and that another rank cannot derive.

Schedulers are deterministic, so ranks with the same journal make the same plans and do the same
with their caches. Sampled tokens are not in it: the ranks agree on them within the step
(``ranks.Ranks.agree``). Each plan's digest is, so that a rank that would compute something else
ends, instead of waiting for the others within the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from zlib import crc32

import msgspec

from chairlift.engine.messages import SamplingParams, Submit
from chairlift.scheduler.cost import Work
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.sequence import Sequence

# A journal of more events is sent without a plan, so that it does not grow while nothing runs.
MAX_EVENTS = 256


class Submitted(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A request was queued. ``awaited``: it is blocked until it is ``Ready``."""

    request: Submit
    awaited: bool


class Ready(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Requests are no longer blocked: their grammars are compiled, or have failed."""

    request_ids: list[str]


class Ended(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A sequence has ended. ``nonfinite``: because its values are not finite."""

    request_id: str
    index: int
    nonfinite: bool


class Learned(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A step of this work took ``seconds``."""

    work: Work
    seconds: float


Event = Submitted | Ready | Ended | Learned


class Turn(msgspec.Struct, tag=True, frozen=True):
    """The events since the last turn, and the digest of the plan that follows them.

    ``digest`` is None if no step follows yet.
    """

    events: list[Event]
    digest: int | None


class Journal(Protocol):
    """Records the decisions of an engine core."""

    def submitted(self, request: Submit, awaited: bool) -> None:
        """Records that a request was queued."""
        ...

    def ready(self, request_ids: Iterable[str]) -> None:
        """Records that requests are no longer blocked."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Records that a sequence has ended."""
        ...

    def learned(self, work: Work, seconds: float) -> None:
        """Records how long a step took."""
        ...

    def publish(self, plan: Plan, cached_bytes: int) -> None:
        """Sends all events, and the digest of a plan that is about to be launched."""
        ...


class NoJournal:
    """The ``Journal`` of an engine without other ranks."""

    def submitted(self, request: Submit, awaited: bool) -> None: ...

    def ready(self, request_ids: Iterable[str]) -> None: ...

    def ended(self, sequence: Sequence) -> None: ...

    def learned(self, work: Work, seconds: float) -> None: ...

    def publish(self, plan: Plan, cached_bytes: int) -> None: ...


class Broadcast:
    """The ``Journal`` of rank 0: ``send`` gets each turn."""

    def __init__(self, send: Callable[[Turn], None]) -> None:
        self._send = send
        self._events: list[Event] = []

    def submitted(self, request: Submit, awaited: bool) -> None:
        self._add(Submitted(_for_followers(request), awaited))

    def ready(self, request_ids: Iterable[str]) -> None:
        if ids := sorted(request_ids):
            self._add(Ready(ids))

    def ended(self, sequence: Sequence) -> None:
        self._add(Ended(sequence.request_id, sequence.index, sequence.nonfinite))

    def learned(self, work: Work, seconds: float) -> None:
        self._add(Learned(work, seconds))

    def publish(self, plan: Plan, cached_bytes: int) -> None:
        self._flush(digest(plan, cached_bytes))

    def flush(self) -> None:
        """Sends all events without a plan. Call it before another engine uses this journal."""
        self._flush(None)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= MAX_EVENTS:
            self.flush()

    def _flush(self, plan_digest: int | None) -> None:
        events, self._events = self._events, []
        self._send(Turn(events, plan_digest))


def digest(plan: Plan, cached_bytes: int) -> int:
    """A checksum of a plan and of the bytes of all cached states."""

    def names(sequences: Iterable[Sequence]) -> list[tuple[str, int]]:
        return [(s.request_id, s.index) for s in sequences]

    parts = (
        *((names(part), list(part.values())) for part in (plan.chunks, plan.cached, plan.decode)),
        *((names(part), names(part.values())) for part in (plan.joins, plan.ends)),
        names(plan.preempted),
        names(plan.leaves),
        plan.capacities,
        cached_bytes,
    )
    return crc32(_encoder.encode(parts))


_encoder = msgspec.msgpack.Encoder()


def _for_followers(request: Submit) -> Submit:
    """The request as another rank needs it: rank 0 alone samples and follows grammars."""
    params = request.params
    return msgspec.structs.replace(
        request, params=SamplingParams(params.max_tokens, seed=0, temperature=0.0)
    )
