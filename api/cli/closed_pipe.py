"""Ends a command quietly when the reader of its output has left, as ``head`` does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def ending_with_reader(run: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    If stdout is a pipe that nobody reads any more, SIGPIPE ends this process, as it ends other
    tools: shells show exit code 141.
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
