"""The data set trace: the recorded arrival times and lengths of real traffic, with random words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from chairlift.loadtest.data.workload import TokenCounter, WorkloadRequest, random_requests
from chairlift.loadtest.errors import UsageError
from chairlift.scheduler.simulate import trace


def read_requests(path: Path, count: int, seconds: float | None) -> list[trace.TraceRequest]:
    """Reads the first ``count`` requests of a trace, within its first ``seconds`` unless None.

    Raises:
        UsageError: the file cannot be read, is not a trace, or has no requests.
    """
    try:
        rows = trace.read_trace(path)
        if seconds is not None:
            rows = itertools.takewhile(lambda row: row.arrival < seconds, rows)
        read = list(itertools.islice(rows, count))
    except (OSError, trace.TraceError) as error:
        raise UsageError(f"--dataset-path: {error}") from error
    if not read:
        raise UsageError(f"--dataset-path: {path} holds no requests")
    return read


async def replayed(
    rows: list[trace.TraceRequest],
    rng: np.random.Generator,
    count_tokens: TokenCounter,
    built: Callable[[], None],
) -> list[WorkloadRequest]:
    """Builds random prompts with the lengths and priorities of the trace.

    A priority of 0 is not sent, since few servers know the field.
    """
    requests = await random_requests(
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        rng,
        count_tokens,
        built,
    )
    return [
        replace(request, body={"priority": row.priority}) if row.priority else request
        for request, row in zip(requests, rows, strict=True)
    ]
