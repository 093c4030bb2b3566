"""The cores that a test process's threads may use, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest threshold that glibc accepts.
_MAPPED_BYTES = 32 << 20
_KEPT_BYTES = 256 << 20


def share_one_core(number: int) -> None:
    """Lets all threads of this process take turns on one core; on Linux only.

    MLX gives each operation to another thread, which ends those of tiny models before the next one
    arrives. On two cores each operation then wakes and stops a thread; on one core, without
    preemption, the other thread runs once all operations of a step are there.
    A step takes a quarter of the time, and a fifth of the CPU time.

    The core is one that few of the other processes with tests have chosen: with fixed cores, two of
    them shared one at times while the other had none.

    Args:
        number: of this process, so that processes that begin together use different cores.
    """
    if _CORES:
        taken, current = _chosen_cores(), os.sched_getaffinity(0)
        ring = [_CORES[(number + step) % len(_CORES)] for step in range(len(_CORES))]
        core = min(ring, key=lambda core: (taken.count(core), current != {core}))
        _place({core}, os.SCHED_BATCH)


def _chosen_cores() -> list[int]:
    """The cores of the other processes with tests that use only one."""
    parent, cores = os.getppid(), list[int]()
    try:
        processes = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return []
    for process in map(int, processes):
        with suppress(ProcessLookupError):  # it has ended
            allowed = os.sched_getaffinity(process)
            if process != os.getpid() and len(allowed) == 1:
                cores += allowed
    return cores


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


def keep_freed_memory() -> None:
    """Keeps freed memory in this process, up to 256 MB; with glibc only.

    glibc gives large blocks back to the kernel, which clears each page when it is used again:
    up to a quarter of the CPU time of tests that allocate and free arrays in each step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _place(cores: set[int], policy: int) -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)
            os.sched_setscheduler(thread, policy, os.sched_param(0))
