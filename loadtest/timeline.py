"""Records a second of decode steps: the time and the host's CPU time of each, and GPU utilization.

A step is launched while the one before runs, so the device waits for the host only if the host's
work takes longer than the device's. The host's work is the thread's CPU time, which excludes
waiting. The utilization comes from NVIDIA's driver: the part of its sampling period in which any
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
    """The times of one step.

    Attributes:
        start: its start, in seconds from the start of the first step.
        wall_ms: its duration in milliseconds.
        host_ms: CPU time of the thread in milliseconds.
    """

    start: float
    wall_ms: float
    host_ms: float


class Timeline(NamedTuple):
    """The recorded steps, and samples of the GPU's utilization in percent (empty without NVIDIA's
    driver).
    """

    steps: list[StepTime]
    utilization: list[int]

    @property
    def summary(self) -> str:
        """The medians and the utilization as one line of text."""
        wall = statistics.median(step.wall_ms for step in self.steps)
        host = statistics.median(step.host_ms for step in self.steps)
        busy = ", ".join(str(percent) for percent in self.utilization) or "not known"
        return (
            f"{len(self.steps)} steps, {wall:.2f} ms each, of which the host works {host:.2f}; "
            f"the device is busy, %: {busy}"
        )


def record(step: Callable[[], object], seconds: float = 1.0) -> Timeline:
    """Calls ``step`` repeatedly for ``seconds`` and records each call."""
    steps: list[StepTime] = []
    with _utilization() as utilization:
        begin = start = time.perf_counter()
        while start - begin < seconds:
            cpu = time.thread_time()
            step()
            now = time.perf_counter()
            host = time.thread_time() - cpu
            steps.append(StepTime(start - begin, (now - start) * 1e3, host * 1e3))
            start = now
    return Timeline(steps, utilization)


@contextmanager
def _utilization() -> Iterator[list[int]]:
    """Samples the GPU's utilization during the ``with``; fills the yielded list when it ends."""
    percent: list[int] = []
    if (tool := shutil.which("nvidia-smi")) is None:
        yield percent
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    sampler = subprocess.Popen(
        [tool, *query, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True
    )
    assert sampler.stdout is not None
    sampler.stdout.readline()  # wait for the first sample
    try:
        yield percent
    finally:
        sampler.terminate()
        percent += [int(line) for line in sampler.stdout.read().split() if line.isdigit()]
        sampler.wait()
