"""Removes what Intel's OpenMP, which MKL uses, leaves of a process that was killed.

With its first product the library registers the process in a file named by the process id, and
reads a file that it finds. Later it needs the file no more, so an engine that has started removes
its own. A process that is killed before that leaves it. If it was killed at the wrong moment, the
file is empty, and the next process with that id ends with a bus error.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_FOLDERS = (Path("/dev/shm"), Path("/tmp"))
# Named by the process id and, in newer versions, by the user's id.
_NAME = re.compile(r"__KMP_REGISTERED_LIB_(\d+)(_\d+)?")


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
