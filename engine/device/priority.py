"""The scheduling priority of threads that work beside the engine's steps."""

from __future__ import annotations

import os
import sys
import threading

# Beside a busy thread of normal priority, one with this niceness gets a tenth of a core.
NICENESS = 10


def give_way() -> None:
    """Lowers the priority of the calling thread, where the system has priorities of threads.

    NOTE: only Linux applies a niceness to one thread; elsewhere it would apply to the process.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
