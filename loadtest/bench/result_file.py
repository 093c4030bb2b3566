"""Writes the result file, with vLLM's keys."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.files import check_writable, write_file
from chairlift.loadtest.bench.metrics import BenchMetrics, Reply, percentile_name
from chairlift.loadtest.bench.result import BenchRun

_FLAG = "--save-result"
_MAX_NAME_BYTES = 80


def result_json(run: BenchRun) -> dict[str, Any]:
    """The result with vLLM's keys. The lists of --save-detailed have one entry per request.

    Times are in milliseconds if their key ends in ``_ms``, else in seconds.
    """
    config, metrics, replies = run.config, run.metrics, run.replies
    result: dict[str, Any] = {
        "date": run.date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": config.label,
        "model_id": run.model,
        "tokenizer_id": config.tokenizer or run.model,
        "num_prompts": len(replies),
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "cancelled": metrics.cancelled,
        "slow_readers": metrics.slow,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    result |= _latencies(metrics)
    if config.ramp is not None:
        result["ramp_up_strategy"] = config.ramp.strategy
        result["ramp_up_start_rps"] = config.ramp.start
        result["ramp_up_end_rps"] = config.ramp.end
    if run.interrupted:
        result["interrupted"] = True
    if run.checks is not None:
        result["metrics_agree"] = run.checked
    if run.verification is not None:
        result["verify_compared"] = run.verification.compared
        result["verify_differing"] = len(run.verification.differences)
        result["verify_failed"] = run.verification.failed
    if config.save_detailed:
        result |= _details(replies)
    return result


def _latencies(metrics: BenchMetrics) -> dict[str, float]:
    result = {}
    for name, latency in metrics.latencies.items():
        result[f"mean_{name}_ms"] = latency.mean
        result[f"median_{name}_ms"] = latency.median
        result[f"std_{name}_ms"] = latency.std
        for p, ms in latency.percentiles.items():
            result[f"p{percentile_name(p)}_{name}_ms"] = ms
    return result


def _details(replies: Sequence[Reply]) -> dict[str, list[Any]]:
    return {
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


def check_result_file(config: BenchConfig) -> None:
    """Checks before a run that its result file can be written, and makes its folder.

    Raises:
        UsageError: it cannot be written.
    """
    check_writable(_path(config, "model", "20260101-000000"), _FLAG)


def save_result(config: BenchConfig, result: dict[str, Any]) -> Path:
    """Writes the result file and returns its path.

    Raises:
        UsageError: the file cannot be written.
    """
    path = _path(config, str(result["model_id"]), result["date"])
    write_file(path, json.dumps(result), _FLAG)
    return path


def _path(config: BenchConfig, model: str, date: str) -> Path:
    folder = Path(config.result_dir or ".")
    if config.result_filename:
        return folder / config.result_filename
    label = _as_name(config.label or config.backend)
    concurrency = (
        f"-concurrency{config.max_concurrency}" if config.max_concurrency is not None else ""
    )
    model = _as_name(os.path.basename(model.rstrip("/")))
    rate = f"{config.request_rate}qps"
    if config.ramp is not None:
        rate = f"ramp-up-{config.ramp.strategy}-{config.ramp.start:g}qps-{config.ramp.end:g}qps"
    return folder / f"{label}-{rate}{concurrency}-{model}-{date}.json"


def _as_name(text: str) -> str:
    """The text as a part of a file's name."""
    name = "".join("_" if c == "/" or not c.isprintable() else c for c in text)
    # A system limits names to 255 bytes.
    return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
