"""Two measurements beside throughput: the effect of a long prompt on streams, and idle CPU use."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.servers import procfs

# Tokens that every stream must generate, once all of them run, before the long prompt arrives.
_QUIET_CHUNKS = 8
_QUIET_LIMIT = 180.0
_POLL_PERIOD = 0.02

# Seconds between the last request and measuring idle CPU use, since freeing rows takes CPU time.
_SETTLE_SECONDS = 3.0


class _Gap(NamedTuple):
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LongPromptResult:
    """The effect of a long prompt on running streams. All times are in seconds.

    Attributes:
        streams: the number of running streams.
        prompt_tokens: length of the long prompt.
        ttft: from its arrival to its first token.
        quiet_gap: median gap between two tokens of a stream before it arrived.
        median_gap: median gap from its arrival to its first token.
        longest_gap: longest gap from its arrival to its first token.
        gaps: the number of gaps from its arrival to its first token.
    """

    streams: int
    prompt_tokens: int
    ttft: float
    quiet_gap: float
    median_gap: float
    longest_gap: float
    gaps: int

    @property
    def ratio(self) -> float:
        """The longest gap relative to the median gap; inf if most tokens arrived together."""
        return self.longest_gap / self.median_gap if self.median_gap else math.inf


async def measure_long_prompt(
    client: OpenAIClient, running: Sequence[WorkloadRequest], long: WorkloadRequest
) -> LongPromptResult:
    """Sends ``long`` while the replies to ``running`` stream; cancels the streams at the end.

    Raises:
        ServerError: a request failed, or the streams ended before the long prompt's first token.
    """
    times: list[list[float]] = [[] for _ in running]
    streams = [
        asyncio.create_task(client.complete(request, stream.append))
        for request, stream in zip(running, times, strict=True)
    ]
    try:
        all_running = await _wait_for_chunks(streams, times, [1] * len(times))
        counts = [len(stream) + _QUIET_CHUNKS for stream in times]
        arrival = await _wait_for_chunks(streams, times, counts)
        reply = await client.complete(long)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    if not reply.ok:
        raise ServerError(f"the long prompt failed: {reply.error}")
    first_token = reply.chunk_times[0]
    if any(stream[-1] < first_token for stream in times):
        raise ServerError("a stream ended, or stood still, beyond the long prompt's first token")

    gaps = [_Gap(*pair) for stream in times for pair in pairwise(stream)]
    quiet = [gap.length for gap in gaps if gap.start >= all_running and gap.end <= arrival]
    touched = [gap for gap in gaps if gap.end > arrival and gap.start < first_token]
    # The gaps at either edge overlap the quiet time, so they may be the longest but are not
    # typical. A server whose streams stop during the entire prefill has no others.
    inside = [gap for gap in touched if gap.start >= arrival and gap.end <= first_token]
    return LongPromptResult(
        streams=len(running),
        prompt_tokens=reply.prompt_tokens,
        ttft=reply.ttft,
        quiet_gap=statistics.median(quiet),
        median_gap=statistics.median(gap.length for gap in inside or touched),
        longest_gap=max(gap.length for gap in touched),
        gaps=len(touched),
    )


async def _wait_for_chunks(
    streams: Sequence[asyncio.Task[object]], times: Sequence[list[float]], counts: Sequence[int]
) -> float:
    """Waits until every stream has its count of chunks; returns the time."""
    deadline = time.perf_counter() + _QUIET_LIMIT
    while any(len(stream) < count for stream, count in zip(times, counts, strict=True)):
        if any(stream.done() for stream in streams):
            raise ServerError("a stream ended before the long prompt arrived")
        if time.perf_counter() > deadline:
            raise ServerError(f"the streams did not get going in {_QUIET_LIMIT:.0f} s")
        await asyncio.sleep(_POLL_PERIOD)
    return time.perf_counter()


def measure_idle(pid: int, seconds: float) -> float | None:
    """CPU use of the idle server and its children, in percent of one core; None without /proc."""
    if not procfs.available():
        return None
    time.sleep(_SETTLE_SECONDS)
    before, started = procfs.cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    used, passed = procfs.cpu_seconds(pid) - before, time.monotonic() - started
    return 100 * used / passed
