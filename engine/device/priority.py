"""The scheduling priority of threads that work beside the engine's steps."""

from __future__ import annotations

import os
import sys
import threading

# Beside a busy thread of normal priority, one with this niceness gets a quarter of a core. So a job
# within its limit of CPU time also ends within its limit of time beside a busy engine
# (``workers.job.WALL_FACTOR``).
NICENESS = 5
MAX_NICENESS = 19


def give_way() -> None:
    """Lowers the priority of the calling thread, where the system has priorities of threads.

    NOTE: only Linux applies a niceness to one thread; elsewhere it would apply to the process.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Relative, like os.nice: a server that was started with a lower priority may not raise it.
        lower = min(os.getpriority(os.PRIO_PROCESS, thread) + NICENESS, MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, lower)
