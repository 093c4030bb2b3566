"""A run of the load test, made up."""

from __future__ import annotations

from datetime import datetime

from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.crosscheck import MetricCheck
from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.bench.result import BenchRun
from chairlift.loadtest.bench.server_metrics import QueueSample


def bench_run(count: int = 50, text: str = "", **flags: object) -> BenchRun:
    """A run of requests 0.1 s apart; every seventh fails, every fifth of the rest is cancelled."""
    replies = []
    for i in range(count):
        start = 100 + i / 10
        times = [start + 0.05 + i / 1000 + 0.01 * n for n in range(8)]
        error = "broken" if i % 7 == 6 else ""
        reply = Reply(10, start, times[-1], 0.02, times, 8, text, error)
        reply.cancelled = not error and i % 5 == 4
        replies.append(reply)
    config = BenchConfig(**{"max_concurrency": 4, **flags})  # type: ignore[arg-type]
    metrics = compute_metrics(replies, 6.0, {}, [99])
    samples = [QueueSample(100 + t, t % 3, 1.0) for t in range(6)]
    checks = [MetricCheck("requests ended", 3, 4, 3), MetricCheck("prompt tokens", 9, 9, 8)]
    moment = datetime(2026, 1, 2, 3, 4)
    return BenchRun(config, "org/model", moment, metrics, replies, samples, checks=checks)
