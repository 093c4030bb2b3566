"""One second of pure decode, step by step: what the host takes of it, and how busy the device is.

A step is launched while the one before runs. So the device waits for the host only if the host's
own time is longer than the device's: its thread's CPU time, measured here, does not count what it
waits. How busy the device is, NVIDIA's driver says: the part of its sampling period in which any
kernel ran.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

SAMPLE_MS = 50


class StepTime(NamedTuple):
    """When a step began, seconds from the first one, and its milliseconds: on the clock, and of
    its thread's CPU time.
    """

    start: float
    wall_ms: float
    host_ms: float


class Timeline(NamedTuple):
    """Steps, and the device's utilization, percent, as often as the driver told; none elsewhere."""

    steps: list[StepTime]
    utilization: list[int]

    @property
    def summary(self) -> str:
        """One line."""
        wall = statistics.median(step.wall_ms for step in self.steps)
        host = statistics.median(step.host_ms for step in self.steps)
        busy = ", ".join(str(percent) for percent in self.utilization) or "not known"
        return (
            f"{len(self.steps)} steps, {wall:.2f} ms each, of which the host works {host:.2f}; "
            f"the device is busy, %: {busy}"
        )


def record(step: Callable[[], object], seconds: float = 1.0) -> Timeline:
    """Takes steps for so long."""
    steps: list[StepTime] = []
    with _utilization() as utilization:
        begin = start = time.perf_counter()
        while start - begin < seconds:
            cpu = time.thread_time()
            step()
            now = time.perf_counter()
            own = time.thread_time() - cpu
            steps.append(StepTime(start - begin, (now - start) * 1e3, own * 1e3))
            start = now
    return Timeline(steps, utilization)


@contextmanager
def _utilization() -> Iterator[list[int]]:
    """What the driver has told while inside, once it is left."""
    percent: list[int] = []
    if (tool := shutil.which("nvidia-smi")) is None:
        yield percent
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    sampler = subprocess.Popen(
        [tool, *query, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True
    )
    assert sampler.stdout is not None
    sampler.stdout.readline()  # it is there
    try:
        yield percent
    finally:
        sampler.terminate()
        percent += [int(line) for line in sampler.stdout.read().split() if line.isdigit()]
        sampler.wait()
