"""Replies that join the answers of all models: their lists, and the health of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from chairlift.api.cluster.forwarding import Headers, ReplyHead
from chairlift.api.errors import UNAVAILABLE_RETRY_SECONDS
from chairlift.api.schemas.paging import ends_of
from chairlift.api.schemas.replies import HealthReply

# The status and the body of each model's reply, by its name; None if no replica answered.
Replies = Mapping[str, tuple[int, bytes] | None]

_JSON: Headers = [("Content-Type", "application/json")]


@dataclass(frozen=True, slots=True)
class Merge:
    """How the models' replies to one route become one.

    Attributes:
        combine: makes the reply from theirs.
        seconds: how long to wait for them.
    """

    combine: Callable[[Replies], tuple[ReplyHead, bytes]]
    seconds: float = 5.0


def _joined(field: str) -> Merge:
    """Joins the lists in ``field``. A model that does not answer is left out."""

    def combine(replies: Replies) -> tuple[ReplyHead, bytes]:
        answers: list[dict[str, Any]] = [
            msgspec.json.decode(reply[1]) for reply in replies.values() if reply and reply[0] == 200
        ]
        if not answers:
            return _unavailable(replies)
        reply = answers[0] | {field: [item for answer in answers for item in answer[field]]}
        if "last_id" in reply:  # Anthropic's form
            reply["first_id"], reply["last_id"] = ends_of([item["id"] for item in reply[field]])
        return ReplyHead(200, _JSON), msgspec.json.encode(reply)

    return Merge(combine)


def _health(replies: Replies) -> tuple[ReplyHead, bytes]:
    """200 if a replica of each model can serve."""
    if all(reply is not None and reply[0] == 200 for reply in replies.values()):
        return ReplyHead(200, _JSON), msgspec.json.encode(HealthReply("ok"))
    return _unavailable(replies)


def _unavailable(replies: Replies) -> tuple[ReplyHead, bytes]:
    names = [name for name, reply in replies.items() if reply is None or reply[0] != 200]
    reason = f"no replica can serve {', '.join(names)}"
    headers = [*_JSON, ("Retry-After", str(UNAVAILABLE_RETRY_SECONDS))]
    return ReplyHead(503, headers), msgspec.json.encode(HealthReply("unavailable", reason))


MERGED: Mapping[tuple[str, str], Merge] = {
    ("GET", "/v1/models"): _joined("data"),
    ("GET", "/api/tags"): _joined("models"),
    ("GET", "/api/ps"): _joined("models"),
    ("GET", "/health"): Merge(_health),
    ("GET", "/ping"): Merge(_health),
    ("POST", "/ping"): Merge(_health),
}
