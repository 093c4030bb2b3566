"""Files of a prefix store while they are being written; what is left of them when their server is
killed is removed by the next server that uses the directory.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# Without locks: nothing takes so long to be written.
_STALE_SECONDS = 3600.0


@contextmanager
def new_part(directory: Path, name: str) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file to be written, and its path, from which it is to be renamed; else it is removed.

    It is locked until it is closed; the kernel frees the lock when the server is killed.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        path = directory / f".{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb") as file:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # another server has found it before it was locked
            try:
                yield file, path
            finally:
                path.unlink(missing_ok=True)
            return


def remove_abandoned(directory: Path) -> None:
    """Removes files that no living server is writing. Links and other things are left alone."""
    for path in directory.glob(".*.tmp"):
        with suppress(OSError):
            # NOTE: for writing, which NFS wants for this lock.
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _is_abandoned(file):
                    path.unlink()
            finally:
                os.close(file)


def _is_abandoned(file: int) -> bool:
    """Whether nobody has the file locked, which is locked then."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here
        return time.time() - os.fstat(file).st_mtime > _STALE_SECONDS
    return True
