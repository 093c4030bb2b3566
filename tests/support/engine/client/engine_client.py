"""Requests to an engine client, and helpers that wait for their outputs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from chairlift.engine.client.local import LocalClient
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.stream import Stream
from chairlift.engine.messages import SamplingParams, Submit, TokenOutput

Client = LocalClient | ProcessClient
# Seconds that a test waits at most.
PATIENCE = 180.0
_ids = count()


def request(prompt: list[int] | None = None, n: int = 1, **params: Any) -> Submit:
    """A greedy request unless ``params`` say otherwise."""
    return Submit(
        f"request-{next(_ids)}",
        prompt or [5, 6, 7],
        SamplingParams(**{"max_tokens": 8, "seed": 0, "temperature": 0.0, **params}),
        n,
        time.monotonic(),
    )


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


async def drained(stream: Stream) -> dict[int, list[TokenOutput]]:
    """A stream's outputs to its end, by choice."""
    outputs: dict[int, list[TokenOutput]] = {}
    async with asyncio.timeout(PATIENCE):
        async for batch in stream:
            assert batch
            for output in batch:
                outputs.setdefault(output.index, []).append(output)
    return outputs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def _cpu_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = map(int, fields[11:13])
    return (user + system) / float(os.sysconf("SC_CLK_TCK"))
