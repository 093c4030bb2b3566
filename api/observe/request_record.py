"""One request and its reply, as the logs and the traces tell it once it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """What logs, traces and the page read of a generation; see ``generate.Generation``."""

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


# What a request generates, once it is valid.
GENERATION: web.RequestKey[ObservedGeneration] = web.RequestKey("generation", ObservedGeneration)


@dataclass(frozen=True, slots=True)
class Exchange:
    """``route`` is the route's pattern; ``status`` CLIENT_LEFT is a client that did not wait.

    ``generation`` is None where nothing was to be generated, or the request was not valid. Times
    are seconds of ``time.monotonic()``.
    """

    request_id: str
    route: str
    method: str
    status: int
    started: float
    generation: ObservedGeneration | None
    ended: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, request: web.Request, request_id: str, status: int, started: float) -> Exchange:
        """What has just ended. Nothing in it is text that a client made up."""
        method = request.method if request.method in hdrs.METH_ALL else "other"
        return cls(request_id, route_of(request), method, status, started, request.get(GENERATION))

    @property
    def seconds(self) -> float:
        """From the request's head to the end of its reply."""
        return self.ended - self.started

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Of each choice, "abort" if the client left first; none if the engine refused them."""
        if self.generation is None or not self.generation.accepted:
            return ()
        unfinished = "abort" if self.status == CLIENT_LEFT else "error"
        return [choice.finish or unfinished for choice in self.generation.choices]
