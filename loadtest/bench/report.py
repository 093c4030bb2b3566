"""The printed report of a run, with vLLM's labels, and of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.metrics import METRIC_NAMES, BenchMetrics, Reply, percentile_name
from chairlift.loadtest.bench.result import BenchRun

_WIDTH = 50


def result_block(config: BenchConfig, metrics: BenchMetrics) -> str:
    """The metrics of a run as text, printed at its end."""
    rows: list[tuple[str, int | float]] = [
        ("Successful requests:", metrics.completed),
        ("Failed requests:", metrics.failed),
    ]
    if config.cancel_rate:
        rows.append(("Cancelled requests:", metrics.cancelled))
    if config.slow_reader_rate:
        rows.append(("Slow readers (in no latency):", metrics.slow))
    if config.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", config.max_concurrency))
    if not math.isinf(config.request_rate):
        rows.append(("Request rate configured (RPS):", config.request_rate))
    rows += [
        ("Benchmark duration (s):", metrics.duration),
        ("Total input tokens:", metrics.total_input_tokens),
        ("Total generated tokens:", metrics.total_output_tokens),
        ("Request throughput (req/s):", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        rows.append(("Request goodput (req/s):", metrics.request_goodput))
    rows += [
        ("Output token throughput (tok/s):", metrics.output_throughput),
        ("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        ("Peak concurrent requests:", float(metrics.max_concurrent_requests)),
        ("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), *map(_row, rows)]
    for name in config.percentile_metrics:
        latency = metrics.latencies[name]
        short, header = METRIC_NAMES[name]
        lines.append(header.center(_WIDTH, "-"))
        lines.append(_row((f"Mean {short} (ms):", latency.mean)))
        lines.append(_row((f"Median {short} (ms):", latency.median)))
        lines += [
            _row((f"P{percentile_name(p)} {short} (ms):", ms))
            for p, ms in latency.percentiles.items()
        ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _row(row: tuple[str, int | float]) -> str:
    label, value = row
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def failures(replies: Sequence[Reply]) -> str:
    """One line with the number of failed requests and the first error; empty if none failed."""
    errors = [reply.error for reply in replies if reply.error]
    if not errors:
        return ""
    return f"{len(errors)} of {len(replies)} requests failed; the first: {errors[0]}\n"


def uncounted(replies: Sequence[Reply]) -> str:
    """One line with the number of replies whose tokens the server did not count; empty if none."""
    complete = [reply for reply in replies if reply.ok]
    missing = sum(reply.usage_tokens is None for reply in complete)
    if not missing:
        return ""
    return (
        f"{missing} of {len(complete)} replies had no usage: each of their chunks counts as one"
        " token, so tokens, throughput and TPOT are wrong if chunks have several.\n"
    )


def sweep_table(runs: Sequence[BenchRun]) -> str:
    """A table with one line for each run of a sweep."""
    head = ("load", "req/s", "tok/s", "TTFT p50", "ITL p50", "E2EL p50", "failed")
    rows = [
        (
            run.config.load,
            f"{run.metrics.request_throughput:.2f}",
            f"{run.metrics.output_throughput:.1f}",
            *(f"{run.metrics.latencies[name].median:.1f}" for name in ("ttft", "itl", "e2el")),
            str(run.metrics.failed),
        )
        for run in runs
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    title = " Sweep ".center(len(lines[0]), "=")
    return "\n".join([title, *lines, "Latencies are milliseconds."])
