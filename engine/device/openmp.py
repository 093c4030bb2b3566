"""Removes what Intel's OpenMP, which MKL uses, leaves of a process that was killed.

The library registers each process in a file named by the process id, and reads a file that it
finds. A process that is killed leaves its file. If it was killed at the wrong moment, the file is
empty, and the next process with that id ends with a bus error when it loads the library.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FOLDERS = (Path("/dev/shm"), Path("/tmp"))


def remove_registration(pid: int) -> None:
    """Removes the registration of a process that has ended, or that has not loaded OpenMP yet.

    A process that cannot be told from this one, because it has the same id in another container,
    loses nothing: the file is only read when a process loads the library.
    """
    names = (f"__KMP_REGISTERED_LIB_{pid}", f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")
    for folder in _FOLDERS:
        for name in names:
            with suppress(OSError):
                (folder / name).unlink()
