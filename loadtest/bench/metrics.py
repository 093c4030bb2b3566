"""Computes the metrics of a run from the times of its replies, with vLLM's definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# NumPy would import it with the first median, when connections may have taken all files.
import numpy.ma


@dataclass(slots=True)
class Reply:
    """A reply as its client saw it. All times are ``time.perf_counter()`` seconds.

    Attributes:
        prompt_tokens: the server's usage or, without one, the workload's prompt length.
        start: when the request was sent.
        end: when the reply was complete.
        queue_time: how long after its arrival time the client sent the request, because of
            ``--max-concurrency`` or because the client itself was too slow.
        chunk_times: the arrival of every chunk with a token.
        usage_tokens: output tokens by the server's usage; None without one.
        text: the text of the reply.
        error: describes a failure.
        cancelled: whether the client disconnected on purpose.
        slow: whether the client read slowly on purpose, so that the times do not describe the
            server.
    """

    prompt_tokens: int
    start: float = 0.0
    end: float = 0.0
    queue_time: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    usage_tokens: int | None = None
    text: str = ""
    error: str = ""
    cancelled: bool = False
    slow: bool = False

    @property
    def ok(self) -> bool:
        """Whether the reply is complete."""
        return not self.error and not self.cancelled

    @property
    def output_tokens(self) -> int:
        """The number of tokens of the reply; 0 if it is not complete."""
        return self.received_tokens if self.ok else 0

    @property
    def received_tokens(self) -> int:
        """The number of tokens that arrived; without the server's usage, that of the chunks."""
        return len(self.chunk_times) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token; 0 if there was none."""
        return self.chunk_times[0] - self.start if self.chunk_times else 0.0

    @property
    def latency(self) -> float:
        """Seconds from sending to the complete reply."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a reply of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between the chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]


class MetricName(NamedTuple):
    """The printed names of a latency: ``short`` in its lines, ``header`` above its section."""

    short: str
    header: str


METRIC_NAMES = {
    "ttft": MetricName("TTFT", "Time to First Token"),
    "tpot": MetricName("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": MetricName("ITL", "Inter-token Latency"),
    "e2el": MetricName("E2EL", "End-to-end Latency"),
    "client_queue_time": MetricName("Client Queue Time", "Client-side Queueing"),
}

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Distribution:
    """One latency over all replies, in milliseconds; all 0 where nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class BenchMetrics:
    """The metrics of a run. Throughputs are per second of ``duration``, which is in seconds.

    Failed and cancelled replies contribute neither tokens nor times. Replies to slow readers count
    as completed and contribute only tokens. ``request_goodput`` is None without objectives.
    """

    duration: float
    completed: int
    failed: int
    cancelled: int
    slow: int
    total_input_tokens: int
    total_output_tokens: int
    request_goodput: float | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies: dict[str, Distribution]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration


def compute_metrics(
    replies: Sequence[Reply],
    duration: float,
    goodput: dict[str, float],
    percentiles: Sequence[float],
) -> BenchMetrics:
    """The metrics of a run of ``duration`` seconds; ``goodput`` limits are in milliseconds."""
    complete = [reply for reply in replies if reply.ok]
    timed = [reply for reply in complete if not reply.slow]
    samples = latency_samples(replies)
    good = sum(_is_good(reply, goodput) for reply in timed)
    return BenchMetrics(
        duration=duration,
        completed=len(complete),
        failed=sum(bool(reply.error) for reply in replies),
        cancelled=sum(reply.cancelled for reply in replies),
        slow=len(complete) - len(timed),
        total_input_tokens=sum(reply.prompt_tokens for reply in complete),
        total_output_tokens=sum(reply.output_tokens for reply in complete),
        request_goodput=good / duration if goodput else None,
        max_output_tokens_per_s=_max_tokens_per_second(complete),
        max_concurrent_requests=_max_concurrent(complete),
        latencies={name: distribution(values, percentiles) for name, values in samples.items()},
    )


def latency_samples(replies: Sequence[Reply]) -> dict[str, list[float]]:
    """Each latency's values in seconds, of complete replies without slow readers."""
    timed = [reply for reply in replies if reply.ok and not reply.slow]
    return {
        "ttft": [reply.ttft for reply in timed],
        "tpot": [tpot for reply in timed if (tpot := reply.tpot) is not None],
        "itl": [itl for reply in timed for itl in reply.itls],
        "e2el": [reply.latency for reply in timed],
        "client_queue_time": [reply.queue_time for reply in timed],
    }


def distribution(seconds: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    """Mean, median, deviation and percentiles of times in seconds, as milliseconds."""
    values = np.asarray(seconds or [0.0]) * 1000
    return Distribution(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles={p: float(np.percentile(values, p)) for p in percentiles},
    )


def percentile_name(p: float) -> str:
    """The number of a percentile as in vLLM's results: 99 or 99.9."""
    return str(int(p)) if p == int(p) else str(p)


def _is_good(reply: Reply, goodput: dict[str, float]) -> bool:
    # A reply of one token has no TPOT, so it cannot miss that objective.
    measured = {"ttft": reply.ttft, "tpot": reply.tpot or 0.0, "e2el": reply.latency}
    return all(measured[name] * 1000 <= limit for name, limit in goodput.items())


def _max_tokens_per_second(replies: list[Reply]) -> float:
    """The maximum number of tokens in one second, counting seconds from the first request.

    The chunks of a reply count as equally many tokens.
    """
    if not replies:
        return 0.0
    origin = min(reply.start for reply in replies)
    chunks = [(reply, math.floor(t - origin)) for reply in replies for t in reply.chunk_times]
    tokens = [reply.received_tokens / len(reply.chunk_times) for reply, _ in chunks]
    return float(np.bincount([second for _, second in chunks], tokens).max())


def _max_concurrent(replies: list[Reply]) -> int:
    """The maximum number of requests in flight."""
    # -1 sorts before +1, so that at the same moment ends come before starts.
    events = sorted(
        [(reply.start, 1) for reply in replies] + [(reply.end, -1) for reply in replies],
    )
    return max(np.cumsum([change for _, change in events]).tolist(), default=0)
