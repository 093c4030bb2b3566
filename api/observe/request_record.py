"""The record of an ended request, for the access log, the page and the traces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from aiohttp import hdrs, web

from chairlift.api.http.requests import CLIENT_LEFT, route_of
from chairlift.api.observe.timing import Detokenizing, PromptTimes
from chairlift.api.schemas.replies import Finish, Usage
from chairlift.engine.messages import SamplingParams


class ObservedChoice(Protocol):
    """One choice of a generation: its output tokens so far, and how it finished."""

    index: int
    tokens: int
    finish: Finish | None


class ObservedModel(Protocol):
    """The model that generates."""

    @property
    def name(self) -> str: ...


class ObservedPrompt(Protocol):
    """One prompt of a generation."""

    @property
    def params(self) -> SamplingParams: ...


class ObservedGeneration(Protocol):
    """The part of ``generate.Generation`` that logs, traces and the page read."""

    id: str
    n: int
    accepted: bool
    detokenizing: Detokenizing

    @property
    def model(self) -> ObservedModel: ...
    @property
    def prompts(self) -> Sequence[ObservedPrompt]: ...
    @property
    def choices(self) -> Sequence[ObservedChoice]: ...
    @property
    def times(self) -> Sequence[PromptTimes]: ...
    def usage(self) -> Usage: ...


Outcome = Literal["ok", "stopped", "refused", "failed"]

# The generation of a request, set once the request is valid.
GENERATION: web.RequestKey[ObservedGeneration] = web.RequestKey("generation", ObservedGeneration)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """An ended request. Times are seconds of ``time.monotonic()``.

    Attributes:
        request_id: its id in logs.
        route: the route's pattern.
        method: the HTTP method, or "other".
        status: the HTTP status; CLIENT_LEFT if the client did not wait for the reply.
        started: when its headers arrived.
        generation: its generation; None if it was invalid or generated nothing.
        ended: when its reply ended.
    """

    request_id: str
    route: str
    method: str
    status: int
    started: float
    generation: ObservedGeneration | None
    ended: float = field(default_factory=time.monotonic)

    @classmethod
    def from_request(
        cls, request: web.Request, request_id: str, status: int, started: float
    ) -> RequestRecord:
        """The record of a request that ends now. It contains no text chosen by the client."""
        method = request.method if request.method in hdrs.METH_ALL else "other"
        return cls(request_id, route_of(request), method, status, started, request.get(GENERATION))

    @property
    def seconds(self) -> float:
        """Seconds from the request's headers to the end of its reply."""
        return self.ended - self.started

    @property
    def outcome(self) -> Outcome:
        """How the request ended.

        "stopped": its client did not wait for the end, as a user who stops a reply; "refused": the
        request was at fault, or the server full; "failed": the server, perhaps after the status 200
        of a stream.
        """
        if self.status == CLIENT_LEFT:
            return "stopped"
        if 400 <= self.status < 500:
            return "refused"
        return "failed" if self.status >= 500 or "error" in self.finish_reasons else "ok"

    @property
    def finish_reasons(self) -> Sequence[str]:
        """The finish reason of each choice, "abort" if the client left first.

        It is empty if the engine did not accept the request.
        """
        if self.generation is None or not self.generation.accepted:
            return ()
        unfinished = "abort" if self.status == CLIENT_LEFT else "error"
        return [choice.finish or unfinished for choice in self.generation.choices]
