"""Processor cores: how many a process may use, and how much of them other processes use."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Columns of /proc/stat, in the order of proc_pid_stat(5): a core's time that nobody uses.
_IDLE = frozenset({3, 4})
# Guests' time, which user and nice time include.
_GUEST = frozenset({8, 9})


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds since some fixed moment: ``at`` of the clock, ``others`` that other processes
    computed on this process's cores, ``waited`` that threads of this process were ready to run
    and had no core.
    """

    at: float
    others: float
    waited: float


def usage() -> Usage:
    """The present usage, on Linux.

    Raises:
        OSError: the system does not publish it (``/proc/stat``, ``/proc/self/task/*/schedstat``).
        ValueError: what it publishes has another form.
    """
    busy, own = _busy_seconds(), time.process_time()
    return Usage(time.monotonic(), busy - own, _waited_seconds())


def available() -> int:
    """Cores that this process may run on: those of its affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float | None:
    """Cores that a cgroup's CPU limit allows on average; None where there is no limit.

    The smallest limit of the process's own cgroup and those above it, of version 2 or 1.
    """
    limits: list[float] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be the host's, and the files those of its root.
        root = cgroups / "cpu" if controllers else cgroups
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            limits += _limit(folder)
            if folder == root:
                break
    return min(limits, default=None)


def _limit(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return [int(most) / int(period)] if most.strip() != "max" and int(most) > 0 else []
    except (OSError, ValueError):
        return []


def _busy_seconds() -> float:
    """What all processes computed on this process's cores; a hypervisor's steal counts as well."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *columns = line.split()
        if name in cores:
            unused = _IDLE | _GUEST
            ticks += sum(int(value) for i, value in enumerate(columns) if i not in unused)
    return ticks / os.sysconf("SC_CLK_TCK")


def _waited_seconds() -> float:
    nanoseconds = 0
    for task in os.listdir(_PROC / "self" / "task"):
        try:
            _, waited, _ = (_PROC / "self" / "task" / task / "schedstat").read_text().split()
        except ProcessLookupError:
            continue  # a thread that has just ended
        except FileNotFoundError:
            if (_PROC / "self" / "schedstat").exists():
                continue
            raise
        nanoseconds += int(waited)
    return nanoseconds / 1e9
