"""A folder of its own for the kernels that MLX compiles.

For the CPU, MLX lets the system's compiler write a kernel to ``$TMPDIR/mlx/VERSION/cpu``; for CUDA
it writes the kernel and its names below ``ptx_cache`` there. It takes a kernel that is there
without compiling it, and does not look whether the kernel is whole. So an engine that loads a
kernel which another process is writing, or which a killed process left half written, fails or ends
with a bus error, and with the second it would do so at every start.

An engine therefore locks a folder in the cache for as long as it lives. The compiler that it starts
inherits the lock, so the folder stays locked while an orphaned compiler writes.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

# Engines that run at the same time need a folder each.
MAX_FOLDERS = 64
_LOCK = "lock"
_WHOLE = "whole"


class KernelFolder:
    """Locks the first folder below ``root`` that no living process has locked.

    Kernels that no earlier owner recorded as whole are removed.

    Args:
        root: is made, for this user only, if it does not exist.

    Raises:
        OSError: no folder can be made, written or locked.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(MAX_FOLDERS):
            self.path = root / str(number)
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            os.set_inheritable(lock, True)
            self._lock = lock
            self._remove_partial()
            return
        raise BlockingIOError(f"{root}: {MAX_FOLDERS} folders are locked")

    def record(self) -> None:
        """Records that all kernels in the folder are whole; call it while MLX compiles nothing.

        A failure costs compiling them again, so it is ignored.
        """
        partial = self.path / f"{_WHOLE}.partial"
        with suppress(OSError):
            partial.write_text("".join(f"{kernel}\n" for kernel in self._kernels()))
            partial.replace(self.path / _WHOLE)

    def close(self) -> None:
        """Releases the lock, unless a compiler still has it."""
        os.close(self._lock)

    def _kernels(self) -> list[Path]:
        files = (path for path in self.path.glob("mlx/**/*") if path.is_file())
        return [path.relative_to(self.path) for path in files]

    def _remove_partial(self) -> None:
        whole: set[str] = set()
        with suppress(OSError, ValueError):
            whole = set((self.path / _WHOLE).read_text().splitlines())
        for kernel in self._kernels():
            if str(kernel) not in whole:
                (self.path / kernel).unlink()


def lock_kernel_folder(root: Path) -> KernelFolder | None:
    """Locks a folder below ``root`` and makes MLX compile into it; call it before MLX compiles.

    Returns:
        None if there is no such folder. MLX then compiles in the temporary folder.
    """
    try:
        folder = KernelFolder(root)
    except OSError:
        return None
    os.environ["TMPDIR"] = str(folder.path)
    return folder
