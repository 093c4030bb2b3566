"""Standard streams: closed, without a reader or space on the disk, or with another encoding."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

# Errors of a disk that takes no more.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def fill() -> None:
    """Opens /dev/null for closed standard streams.

    Otherwise later files and sockets would get their numbers, and a client would receive the text
    that is written to standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                # The system assigns the lowest free number, which is this one.
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def replace_unencodable() -> None:
    """Lets standard output print any text: a locale's encoding may lack some of its characters."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def ending_with_output(run: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    If stdout is a pipe that nobody reads any more, SIGPIPE ends this process, as it ends other
    tools: shells show exit code 141. If it is a file on a full disk, the exit code is 1, after one
    line on stderr.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
        raise
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        print(
            f"chairlift: error: {error.filename or 'standard output'}: {error.strerror}",
            file=sys.stderr,
        )
        if error.filename is None:
            # Python writes at its end what is still buffered.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
