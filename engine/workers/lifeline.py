"""Ties a child process to its parent: the child ignores signals and ends when the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Terminals, supervisors and ``pkill`` send these to all processes of a server at once. Only the
# parent handles them; it ends its children when it is ready.
_FOR_THE_PARENT = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


def follow_parent(parent: int) -> None:
    """Ignores the parent's signals, and ends this process when the process ``parent`` ends.

    On Linux the kernel kills this process when its parent ends, even if this process is stopped
    (prctl(2), ``PR_SET_PDEATHSIG``). To the kernel the parent is the *thread* that started this
    process, so that thread has to live as long as the parent. Other systems have no such signal.
    There a child watches a pipe from its parent, which a stopped child does only once it continues.

    Raises:
        OSError: the kernel refuses.
    """
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0))
        if libc.prctl(_PR_SET_PDEATHSIG, *arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(0)
