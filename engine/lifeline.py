"""What a child process does at its start so that it lives exactly as long as its parent wants."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# What terminals, supervisors and ``pkill`` send to all processes of a server at once. The parent
# handles them, and ends its children when it is ready to.
_FOR_THE_PARENT = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


def follow_parent(parent: int) -> None:
    """Leaves signals to the parent process, whose id is ``parent``, and ends when it ends.

    On Linux the kernel kills this process when its parent has ended, also if this process is
    stopped (prctl(2), ``PR_SET_PDEATHSIG``). To the kernel the parent is the *thread* that started
    this process, so that has to be one that lives as long as the parent. Other systems have no such
    signal: there a child watches a pipe from its parent, which a stopped process does not do until
    it is continued.

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
