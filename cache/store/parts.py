"""Temporary files of a prefix store, used while a node is written.

If a server is killed, the next server that uses the directory removes its temporary files.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_RANDOM_BYTES = 8
_NAME = re.compile(rf"\..+\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.tmp")
# On file systems without locks: no write takes this long.
_STALE_SECONDS = 3600.0


@contextmanager
def new_part(directory: Path, name: str) -> Iterator[tuple[BinaryIO, Path]]:
    """Yields a new file and its path; the caller renames it when complete, else it is removed.

    It is locked until it is closed; the kernel releases the lock if the server is killed.

    Raises:
        OSError: the file cannot be created.
    """
    while True:
        path = directory / f".{name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp"
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
    """Removes temporary files of ``new_part`` that no running server is writing."""
    for path in directory.glob(".*.tmp"):
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):
            # NOTE: opened for writing, which NFS requires for this lock.
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _is_abandoned(file):
                    path.unlink()
            finally:
                os.close(file)


def _is_abandoned(file: int) -> bool:
    """Whether no process had locked the regular file; if so, it is locked now."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here
        return time.time() - os.fstat(file).st_mtime > _STALE_SECONDS
    return True
