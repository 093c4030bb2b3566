"""Intel's OpenMP, which MKL uses: whether it can start, and what it leaves of a killed process.

With its first product the library registers the process in a file named by the process id, and
reads a file that it finds. Later it needs the file no more, so an engine that has started removes
its own. A process that is killed before that leaves it. If it was killed at the wrong moment, the
file is empty, and the next process with that id ends with a bus error.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

_FOLDERS = (Path("/dev/shm"), Path("/tmp"))
_BYTES = 1024
# Named by the process id and, in newer versions, by the user's id.
_NAME = re.compile(r"__KMP_REGISTERED_LIB_(\d+)(_\d+)?")


def has_room() -> bool:
    """Whether a process can register. On a full /dev/shm the library ends it with a bus error.

    A folder that is missing or cannot be written to does no harm: the library goes on without.
    """
    try:
        with tempfile.TemporaryFile(dir=_FOLDERS[0]) as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return True


def remove_registration(pid: int) -> None:
    """Removes the registration of a process.

    A process that cannot be told from it, because it has the same id in another container, loses
    nothing: the file is only read with a process's first product.
    """
    names = (f"__KMP_REGISTERED_LIB_{pid}", f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")
    for folder in _FOLDERS:
        for name in names:
            with suppress(OSError):
                (folder / name).unlink()


def remove_abandoned_registrations() -> None:
    """Removes the registrations of this user's processes that have ended, of any program.

    As above, a process of another container loses nothing.
    """
    for folder in _FOLDERS:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if (match := _NAME.fullmatch(entry.name)) and not _runs(int(match[1])):
                    with suppress(OSError):  # gone, or another user's
                        if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                            os.unlink(entry)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True
