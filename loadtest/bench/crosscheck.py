"""Compares the server's metrics with the clients' measurements.

Complete replies are compared exactly. For a reply that was cancelled or failed, the client knows
only a minimum and a maximum, and the server's number must lie between them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.bench.server_metrics import RUNNING, Scrape, parse_scrape
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError

ENDED = "vllm:request_success_total"
PROMPT_TOKENS = "vllm:request_prompt_tokens_sum"
GENERATED_TOKENS = "vllm:generation_tokens_total"

_COMPLETE = ("stop", "length")

# A server takes a moment to notice that a client has left.
_SETTLE_SECONDS = 10.0
_SETTLE_PERIOD = 0.1


class MetricCheck(NamedTuple):
    """A compared number: the clients expect ``low`` to ``high``, the server counted ``server``."""

    name: str
    low: float
    high: float
    server: float

    @property
    def holds(self) -> bool:
        return self.low <= self.server <= self.high

    @property
    def expected(self) -> str:
        """The expected range as text."""
        if self.low == self.high:
            return f"{self.low:.0f}"
        upper = "" if math.isinf(self.high) else f", at most {self.high:.0f}"
        return f"at least {self.low:.0f}{upper}"


class CrossCheck:
    """Reads the server's counters before a run and compares their growth with the replies."""

    def __init__(self, client: OpenAIClient, address: str, before: Scrape) -> None:
        self._client = client
        self._address = address
        self._before = before

    @classmethod
    async def begin(cls, client: OpenAIClient, address: str) -> CrossCheck:
        """Reads the counters before the run.

        Raises:
            ServerError: the metrics cannot be read, or lack one of vLLM's names.
        """
        before = parse_scrape(await client.fetch(address))
        missing = [n for n in (ENDED, PROMPT_TOKENS, GENERATED_TOKENS) if n not in before.samples]
        if missing:
            raise ServerError(f"{address} has no {', '.join(missing)}")
        return cls(client, address, before)

    async def end(
        self, requests: Sequence[WorkloadRequest], replies: Sequence[Reply], shown: bool
    ) -> list[MetricCheck]:
        """Compares counters and replies, waiting up to 10 s until they agree.

        Args:
            requests: the requests that were sent.
            replies: their replies.
            shown: whether to show progress.

        Raises:
            ServerError: the metrics cannot be read.
        """
        prompts = await self._count_missing_prompts(requests, replies, shown)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            after = parse_scrape(await self._client.fetch(self._address))
            checks = compare(self._before, after, requests, replies, prompts)
            settled = all(check.holds for check in checks) and not after.total(RUNNING)
            if settled or time.monotonic() > deadline:
                return checks
            await asyncio.sleep(_SETTLE_PERIOD)

    async def _count_missing_prompts(
        self, requests: Sequence[WorkloadRequest], replies: Sequence[Reply], shown: bool
    ) -> dict[int, int | None]:
        """Counts with /tokenize the prompt tokens of each reply without usage, by its index."""
        missing = [i for i, reply in enumerate(replies) if not _has_usage(reply)]
        counts = {}
        progress = Progress(len(missing), "tokenize", unit="prompts", shown=shown and bool(missing))
        async with progress:
            for i in missing:
                counts[i] = await self._client.count_prompt(requests[i])
                progress.add_done()
        return counts


def _has_usage(reply: Reply) -> bool:
    return reply.ok and reply.usage_tokens is not None


def compare(
    before: Scrape,
    after: Scrape,
    requests: Sequence[WorkloadRequest],
    replies: Sequence[Reply],
    prompts: Mapping[int, int | None],
) -> list[MetricCheck]:
    """Compares the growth of the counters from ``before`` to ``after`` with the replies.

    ``prompts`` maps the index of a reply without usage to its prompt tokens, or None if unknown.
    """

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    completed = sum(reply.ok for reply in replies)
    cancelled = sum(reply.cancelled for reply in replies)
    # Some failed requests may never have reached the engine.
    failed = len(replies) - completed - cancelled
    prompt_low = prompt_high = generated_low = generated_high = 0.0
    for i, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        if reply.ok and reply.usage_tokens is not None:
            prompt_low += reply.prompt_tokens
            prompt_high += reply.prompt_tokens
            generated_low += reply.usage_tokens
            generated_high += reply.usage_tokens
            continue
        prompt = prompts[i]
        prompt_low += 0 if reply.error or prompt is None else prompt
        prompt_high += math.inf if prompt is None else prompt
        # Every chunk has at least one token. The client never saw tokens that were in transit.
        generated_low += len(reply.chunk_times)
        generated_high += request.output_len
    return [
        MetricCheck(
            "requests completed",
            completed,
            completed + cancelled + failed,
            sum(grown(ENDED, finished_reason=reason) for reason in _COMPLETE),
        ),
        MetricCheck(
            "requests ended",
            completed + cancelled,
            completed + cancelled + failed,
            grown(ENDED),
        ),
        MetricCheck("prompt tokens", prompt_low, prompt_high, grown(PROMPT_TOKENS)),
        MetricCheck("generated tokens", generated_low, generated_high, grown(GENERATED_TOKENS)),
    ]


def check_report(checks: Sequence[MetricCheck]) -> str:
    """A text that lists each number and whether it agrees."""
    agree = all(check.holds for check in checks)
    verdict = "agree" if agree else "DISAGREE (or others use the server, too)"
    lines = [f"Client and server {verdict}:"]
    lines += [
        f"  {check.name}: {check.server:.0f} by the server, {check.expected} by the clients"
        f"{'' if check.holds else '  <- differs'}"
        for check in checks
    ]
    return "\n".join(lines)
