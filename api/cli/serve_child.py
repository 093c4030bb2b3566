"""``chairlift serve`` as the child of a replica: it drains and ends when its parent ends.

The parent holds the other end of this process's standard input, so the end of that stream means
that the parent has gone, for whatever reason and on every system.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading

from chairlift.api.cli.main import main

_BYTES = 4096


def _end_with_parent() -> None:
    while os.read(0, _BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _has_parent() -> bool:
    """Whether standard input is a pipe or a socket, and not a terminal or /dev/null."""
    mode = os.fstat(0).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


if __name__ == "__main__":
    if _has_parent():
        watch = threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True)
        watch.start()
    sys.exit(main(["serve", *sys.argv[1:]]))
