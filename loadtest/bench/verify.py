"""Verifies that greedy replies do not depend on the other requests in the batch."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.data.workload import WorkloadRequest

# Characters shown before and after the first difference.
_SHOWN_BEFORE = 20
_SHOWN_AFTER = 40
_DIFFERENCES_SHOWN = 5


class Difference(NamedTuple):
    """A reply that differs from the reply to the same request sent alone.

    Attributes:
        number: the index of the request.
        at: the index of the first differing character.
        under_load: the reply of the run.
        alone: the reply to the request sent alone.
    """

    number: int
    at: int
    under_load: Reply
    alone: Reply


class Verification(NamedTuple):
    """The result of the comparison.

    Attributes:
        compared: the number of compared replies.
        failed: requests that got no complete reply when sent alone.
        differences: the replies that differ.
    """

    compared: int
    failed: int
    differences: list[Difference]

    @property
    def passed(self) -> bool:
        return not self.differences and not self.failed


def _uncached(request: WorkloadRequest, index: int) -> WorkloadRequest:
    """The request with a unique cache salt, so that it reuses no prefix of its first run."""
    salt = {"cache_salt": f"verify-{uuid.uuid4().hex}-{index}"}
    return replace(request.behaved, body={**request.body, **salt})


async def verify_replies(
    client: OpenAIClient,
    requests: Sequence[WorkloadRequest],
    replies: Sequence[Reply],
    progress: Progress,
) -> Verification:
    """Sends every request again, one at a time to an idle server, and compares text and length.

    Requests whose first reply is incomplete are skipped; the run has reported them already.
    """
    compared = failed = 0
    differences = []
    async with progress:
        for index, (request, reply) in enumerate(zip(requests, replies, strict=True)):
            if not reply.ok:
                continue
            alone = await client.complete(_uncached(request, index), progress.add_chunk)
            progress.add_reply(alone)
            if not alone.ok:
                failed += 1
                continue
            compared += 1
            if (alone.text, alone.output_tokens) != (reply.text, reply.output_tokens):
                at = _first_difference(reply.text, alone.text)
                differences.append(Difference(index, at, reply, alone))
    return Verification(compared, failed, differences)


def _first_difference(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def verification_report(result: Verification) -> str:
    """The result as text, with excerpts of the first differing replies."""
    lines = [
        f"Replies that differ from their solo run: {len(result.differences)} of {result.compared}"
    ]
    if result.failed:
        lines.append(f"Requests that failed when sent alone: {result.failed}")
    for difference in result.differences[:_DIFFERENCES_SHOWN]:
        lines += [
            f"  request {difference.number}, from character {difference.at}:",
            f"    under load {_excerpt(difference.under_load, difference.at)}",
            f"    alone      {_excerpt(difference.alone, difference.at)}",
        ]
    hidden = len(result.differences) - _DIFFERENCES_SHOWN
    if hidden > 0:
        lines.append(f"  and {hidden} more")
    return "\n".join(lines)


def _excerpt(reply: Reply, at: int) -> str:
    start = max(0, at - _SHOWN_BEFORE)
    text = reply.text[start : at + _SHOWN_AFTER]
    before = "…" if start else ""
    after = "…" if at + _SHOWN_AFTER < len(reply.text) else ""
    return f"({reply.output_tokens} tokens) {before}{text!r}{after}"
