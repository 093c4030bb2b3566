"""Rank 0's decisions: all that the next plan depends on and that another rank cannot derive.

Schedulers are deterministic, so ranks with the same journal make the same plans and do the same
with their caches. Sampled tokens are not in it: the ranks agree on them within the step
(``ranks.Ranks.agree``). Each plan's digest is, so that a rank that would compute something else
ends, instead of waiting for the others within the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
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


class Read(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The running step was read before the next was planned."""


class ProposedDraft(msgspec.Struct, frozen=True, array_like=True):
    """The proposed tokens of a sequence that a step verifies."""

    request_id: str
    index: int
    tokens: list[int]


Event = Submitted | Ready | Ended | Learned | Read


class Turn(msgspec.Struct, tag=True, frozen=True):
    """The events since the last turn, and the plan that follows them.

    Attributes:
        digest: that of the plan; None if no step follows yet.
        drafts: those of the plan.
    """

    events: list[Event]
    digest: int | None
    drafts: list[ProposedDraft] = []


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

    def read(self) -> None:
        """Records that the running step is read before the next is planned."""
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

    def read(self) -> None: ...

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

    def read(self) -> None:
        self._add(Read())

    def publish(self, plan: Plan, cached_bytes: int) -> None:
        drafts = [
            ProposedDraft(s.request_id, s.index, list(tokens)) for s, tokens in plan.drafts.items()
        ]
        self._flush(digest(plan, cached_bytes), drafts)

    def flush(self) -> None:
        """Sends all events without a plan. Call it before another engine uses this journal."""
        self._flush(None)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= MAX_EVENTS:
            self.flush()

    def _flush(self, plan_digest: int | None, drafts: Seq[ProposedDraft] = ()) -> None:
        events, self._events = self._events, []
        self._send(Turn(events, plan_digest, list(drafts)))


def digest(plan: Plan, cached_bytes: int) -> int:
    """A checksum of a plan and of the bytes of all cached states."""

    def names(sequences: Iterable[Sequence]) -> list[tuple[str, int]]:
        return [(s.request_id, s.index) for s in sequences]

    parts = (
        *((names(part), list(part.values())) for part in (plan.chunks, plan.cached, plan.decode)),
        *((names(part), names(part.values())) for part in (plan.joins, plan.ends)),
        names(plan.preempted),
        names(plan.leaves),
        (names(plan.drafts), list(plan.drafts.values())),
        plan.capacities,
        cached_bytes,
    )
    return crc32(_encoder.encode(parts))


_encoder = msgspec.msgpack.Encoder()


def _for_followers(request: Submit) -> Submit:
    """The request as another rank needs it: rank 0 alone samples and follows grammars."""
    params = request.params
    return msgspec.structs.replace(
        request, params=SamplingParams(params.max_tokens, seed=0, temperature=0.0), prediction=[]
    )
