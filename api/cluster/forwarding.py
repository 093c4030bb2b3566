"""The messages between the ingress and a replica: a whole request, and a reply in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

# Headers of one connection, and those that each connection computes anew.
_OF_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "expect", "host", "content-length", "date", "server"),
    }
)

Headers = list[tuple[str, str]]


class ReplicaLost(Exception):
    """The replica ended or stopped answering before its reply was complete."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request.

    Attributes:
        method: the HTTP method.
        path: path and query, percent-encoded.
        headers: the end-to-end headers.
        body: the whole body.
        prompt: the beginning of the prompt, by which Ray's router chooses the replica. Never empty,
            because the router divides by its length.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    prompt: str


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The status and the end-to-end headers of a reply, sent before its body."""

    status: int
    headers: Headers

    def header(self, name: str) -> str:
        """The first value of a header, by its name in lower case, or ""."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def is_stream(self) -> bool:
        """Whether the reply is a stream of events or lines."""
        media = self.header("content-type").partition(";")[0].strip().lower()
        return media in ("text/event-stream", "application/x-ndjson")


class Backend(Protocol):
    """The replicas of one model."""

    def forward(self, request: ForwardedRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        """Yields the head of the reply, then its body in pieces. Closing it aborts the request.

        Raises:
            ReplicaLost: the replica that got the request is gone.
            QueueFull: too many requests wait for a replica.
            NotReady: the model's deployment has failed.
        """
        ...


def end_to_end(headers: Sequence[tuple[str, str]]) -> Headers:
    """The headers that are not about one connection."""
    found = [(name, value) for name, value in headers if name.lower() not in _OF_CONNECTION]
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == "connection"
        for name in value.split(",")
    }
    return [(name, value) for name, value in found if name.lower() not in named]
