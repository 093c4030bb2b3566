"""The folder in which an engine process finds its parent's socket, and its black box.

Once the engine has opened both, it removes the folder: nothing is left in the temporary folder,
however the two processes end. A folder whose server was killed before that is removed when another
server starts.
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

    The kernel frees the lock when the server ends, however it does.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))
            with suppress(FileNotFoundError):
                self._directory = os.open(self.path, _FLAGS)
                # It waits for a ``remove_abandoned`` that found the folder before it was locked.
                fcntl.flock(self._directory, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._directory)

    def close(self) -> None:
        """Removes what is left of the folder, and frees the lock."""
        remove(self.path)
        os.close(self._directory)


def remove(path: Path) -> None:
    """Removes a folder and the files that it may have; nothing else, and no more if it is gone."""
    with suppress(OSError):
        directory = os.open(path, _FLAGS)
        try:
            _empty(directory)
        finally:
            os.close(directory)
        path.rmdir()


def remove_abandoned() -> None:
    """Removes the folders of servers that were killed.

    Only real directories of this user count, and only those that no server has locked.
    """
    root = _root()
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                _remove_if_abandoned(root / entry.name)


def _root() -> Path:
    """The temporary folder, or ``/tmp`` if a socket's path in it would be too long.

    A folder on a full disk is used, too: ``tempfile`` takes none in which it cannot write a file,
    and ours may stay empty.
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
    except OSError:  # locked, or with other files in it
        return
    finally:
        os.close(directory)


def _empty(directory: int) -> None:
    for name in (SOCKET, BLACK_BOX):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
