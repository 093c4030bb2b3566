"""The cores that a test process's threads may use."""

from __future__ import annotations

import os
from contextlib import suppress

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def share_one_core(number: int) -> None:
    """Lets all threads of this process take turns on one core; on Linux only.

    MLX gives each operation to another thread, which ends those of tiny models before the next one
    arrives. On two cores each operation then wakes and stops a thread; on one core, without
    preemption, the other thread runs once all operations of a step are there.
    A step takes a quarter of the time, and a fifth of the CPU time.

    Args:
        number: of this process, so that processes use different cores.
    """
    if _CORES:
        _place({_CORES[number % len(_CORES)]}, os.SCHED_BATCH)


def share_all_cores() -> None:
    """Undoes that; threads still do not preempt each other, nor do those of child processes."""
    if _CORES:
        _place(set(_CORES), os.SCHED_BATCH)


def let_ranks_preempt() -> None:
    """Threads of this test and of its child processes preempt others, as usual.

    A rank of a ring polls until the other one sends. Without preemption the other gets a core only
    when the poller has used up its time: beside two busy processes, tests of ranks took 2.5 times
    as much CPU time.
    """
    if _CORES:
        _place(set(_CORES), os.SCHED_OTHER)


def _place(cores: set[int], policy: int) -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)
            os.sched_setscheduler(thread, policy, os.sched_param(0))
