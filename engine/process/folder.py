"""The folder in which an engine process finds its parent's socket and its black box.

Once the engine has opened both, it removes the folder, so nothing stays in the temporary folder,
however the two processes end. If a server was killed before that, the next server that starts
removes the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq

_PREFIX = "chairlift-engine-"
_NAME = re.compile(re.escape(_PREFIX) + r"\w+")
SOCKET = "socket"
BLACK_BOX = "computing"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class EngineFolder:
    """A new folder for this user only, locked while its server lives; ``close`` must follow.

    The kernel releases the lock when the server ends, however it ends.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))
            with suppress(FileNotFoundError):
                self._directory = os.open(self.path, _FLAGS)
                # This waits for a ``remove_abandoned`` that found the folder before it was locked.
                fcntl.flock(self._directory, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._directory)

    def close(self) -> None:
        """Removes the folder if it still exists, and releases the lock."""
        remove(self.path)
        os.close(self._directory)


def remove(path: Path) -> None:
    """Removes an engine's two files and then the folder, unless it has other files or is gone."""
    with suppress(OSError):
        directory = os.open(path, _FLAGS)
        try:
            _empty(directory)
        finally:
            os.close(directory)
        path.rmdir()


def remove_abandoned() -> None:
    """Removes the folders of servers that were killed.

    Removes only real directories of this user that no server has locked.
    """
    root = _root()
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                _remove_if_abandoned(root / entry.name)


def _root() -> Path:
    """The temporary folder, or ``/tmp`` if a socket's path in it would be too long.

    ``tempfile`` rejects a folder on a full disk, because it cannot write a file there. Here such a
    folder is used: a socket needs no space, and the black box may stay empty.
    """
    try:
        root = Path(tempfile.gettempdir())
    except FileNotFoundError:
        root = Path(os.environ.get("TMPDIR") or "/tmp")
    # ``mkdtemp`` adds eight characters.
    socket = os.fsencode(root / f"{_PREFIX}{'x' * 8}" / SOCKET)
    return root if len(socket) <= zmq.IPC_PATH_MAX_LEN else Path("/tmp")


def _remove_if_abandoned(path: Path) -> None:
    try:
        directory = os.open(path, _FLAGS)
    except OSError:  # another user's, a link, or gone
        return
    try:
        if os.fstat(directory).st_uid == os.geteuid():
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(directory)
            path.rmdir()
    except OSError:  # locked, or it contains other files
        return
    finally:
        os.close(directory)


def _empty(directory: int) -> None:
    for name in (SOCKET, BLACK_BOX):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
