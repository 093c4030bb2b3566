"""The printed block and the result file, with vLLM's labels and keys."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.errors import UsageError
from chairlift.loadtest.metrics import METRIC_NAMES, BenchMetrics, Reply
from chairlift.loadtest.verify import Verification

_WIDTH = 50


def result_block(config: BenchConfig, metrics: BenchMetrics) -> str:
    """What is printed at the end of a run."""
    rows: list[tuple[str, int | float]] = [
        ("Successful requests:", metrics.completed),
        ("Failed requests:", metrics.failed),
    ]
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
        lines += [_row((f"P{p:g} {short} (ms):", ms)) for p, ms in latency.percentiles.items()]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _row(row: tuple[str, int | float]) -> str:
    label, value = row
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def result_json(
    config: BenchConfig,
    model: str,
    metrics: BenchMetrics,
    replies: Sequence[Reply],
    verification: Verification | None,
    now: datetime,
) -> dict[str, Any]:
    """The result under vLLM's keys; what --save-detailed adds is one list entry a request.

    Times that end in ``_ms`` are milliseconds, all others seconds.
    """
    result: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": config.label,
        "model_id": model,
        "num_prompts": config.num_prompts,
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name, latency in metrics.latencies.items():
        result[f"mean_{name}_ms"] = latency.mean
        result[f"median_{name}_ms"] = latency.median
        result[f"std_{name}_ms"] = latency.std
        for p, ms in latency.percentiles.items():
            result[f"p{p:g}_{name}_ms"] = ms
    if verification is not None:
        result["verify_compared"] = verification.compared
        result["verify_differing"] = len(verification.differences)
        result["verify_failed"] = verification.failed
    if config.save_detailed:
        result |= {
            "input_lens": [reply.prompt_tokens for reply in replies],
            "output_lens": [reply.output_tokens for reply in replies],
            "ttfts": [reply.ttft for reply in replies],
            "itls": [reply.itls for reply in replies],
            "latencies": [reply.latency for reply in replies],
            "queue_times": [reply.queue_time for reply in replies],
            "start_times": [reply.start for reply in replies],
            "generated_texts": [reply.text for reply in replies],
            "errors": [reply.error for reply in replies],
        }
    return result


def save_result(config: BenchConfig, result: dict[str, Any]) -> Path:
    """Writes the result file and returns its path; the folder is made if need be.

    Raises:
        UsageError: it cannot be written.
    """
    concurrency = (
        f"-concurrency{config.max_concurrency}" if config.max_concurrency is not None else ""
    )
    model = os.path.basename(str(result["model_id"]).rstrip("/"))
    name = config.result_filename or (
        f"{config.label or config.backend}-{config.request_rate}qps{concurrency}"
        f"-{model}-{result['date']}.json"
    )
    path = Path(config.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the result: {error}") from error
    return path
