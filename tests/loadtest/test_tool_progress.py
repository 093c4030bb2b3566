"""Progress of the tools: in a pipe one line at the end, or one every half minute."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest

from chairlift.loadtest.bench import progress
from chairlift.loadtest.bench.progress import Progress


async def _run(count: int, seconds: float) -> None:
    async with Progress(count, "bench") as shown:
        for _ in range(count):
            await asyncio.sleep(seconds / count)
            shown.add_done()


async def test_a_short_run_is_one_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    await _run(50, 0.1)
    (line,) = written.getvalue().splitlines()
    assert line.startswith("bench: 50/50 requests in 0 s, ")


async def test_a_long_run_has_a_line_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_PERIOD", 0.1)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    await _run(10, 0.5)
    lines = written.getvalue().splitlines()
    assert 2 <= len(lines) <= 7
    assert lines[-1].startswith("bench: 10/10 requests")
    assert "\r" not in written.getvalue()
