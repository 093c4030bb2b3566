"""Counts the processor cores that this process may use, and the use that others make of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.device.control_group import group_folders

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Columns of a core's idle time in /proc/stat, in the order of proc_stat(5).
_IDLE = frozenset({3, 4})
# Columns of the time of virtual machines (guests), which user and nice time include already.
_GUEST = frozenset({8, 9})


@dataclass(frozen=True, slots=True)
class CoreUsage:
    """Counters in seconds, each since some fixed moment.

    Attributes:
        at: the clock.
        others: time that other processes computed on this process's cores.
        waited: time that threads of this process were ready to run, but had no core.
    """

    at: float
    others: float
    waited: float


def usage() -> CoreUsage:
    """Reads the counters, on Linux.

    Raises:
        OSError: the system does not publish them (``/proc/stat``, ``/proc/self/task/*/schedstat``).
        ValueError: the files have another format.
    """
    busy, ours = _busy_seconds(), time.process_time()
    return CoreUsage(time.monotonic(), busy - ours, _waited_seconds())


def available() -> int:
    """The number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float | None:
    """The number of cores that cgroup CPU limits allow on average; None without a limit.

    This is the smallest limit of the process's cgroup and its ancestors, of version 2 or 1.
    """
    folders = group_folders("cpu", proc, cgroups)
    return min((limit for folder in folders for limit in _limit(folder.path)), default=None)


def _limit(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return [int(quota) / int(period)] if quota.strip() != "max" and int(quota) > 0 else []
    except (OSError, ValueError):
        return []


def _busy_seconds() -> float:
    """Seconds that all processes, or a hypervisor, used on this process's cores."""
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
