"""One request and its reply, as the logs and the traces tell it once it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import hdrs, web

from chairlift.api.generate.generation import Generation

# What a request generates, once it is valid.
GENERATION: web.RequestKey[Generation] = web.RequestKey("generation", Generation)
# What it is called in logs and in its reply's head: the client's own id of it, or one made here.
GIVEN_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
# nginx's status for a client that left before its reply; never sent.
CLIENT_LEFT = 499


def route_of(request: web.Request) -> str:
    """The route's pattern, "unmatched" where there is none."""
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


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
    generation: Generation | None
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
