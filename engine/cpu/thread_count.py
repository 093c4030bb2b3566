"""How many threads the BLAS computes with, while other processes want the cores.

A product is done when the last of its threads is, and a decode step has hundreds of products. Each
of them waits for the thread that has no core at the moment: beside two busy processes on two cores
a step on two threads takes ten to fifty times as long, on one thread twice as long. So while
threads wait for cores, there are only as many of them as cores are free.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from types import TracebackType
from typing import Protocol

from chairlift.engine.cpu import cores
from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.cpu.cores import Usage

log = logging.getLogger(__name__)

# Seconds between two looks at the machine. A look takes 0.2 ms.
INTERVAL = 0.25
# Products of n threads are this power of n faster than those of one (measured on two cores: 1.6).
SCALING = 0.75
# The part of a core that others may use while it still counts as free: an API process, clients.
SHARED = 0.4
# Seconds for which cores have to be free before there are more threads, and the most seconds that
# it becomes: it doubles whenever the cores turn out to be taken within ``SETTLED`` seconds.
PATIENCE, MOST_PATIENCE, SETTLED = 1.0, 60.0, 10.0
# What libraries call it, in C's linkage: set, then get. PyPI's scipy-openblas32 has a prefix.
_NAMES = (
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
)


class Policy:
    """Decides how many threads there should be. Does nothing but arithmetic.

    Args:
        most: threads on an undisturbed machine.
        available: cores that the process may run on.
    """

    def __init__(self, most: int, available: int) -> None:
        self._most = most
        self._available = available
        self.threads = most
        self._patience = PATIENCE
        self._free_since: float | None = None
        self._raised_at: float | None = None

    def decide(self, before: Usage, now: Usage) -> int:
        """The number of threads from ``now`` on, by what happened since ``before``."""
        seconds = now.at - before.at
        if seconds <= 0:
            return self.threads
        others = max(0.0, now.others - before.others) / seconds
        waited = max(0.0, now.waited - before.waited) / seconds
        free = min(self._most, max(1, int(self._available - others + SHARED)))
        if free < self.threads:
            self._free_since = None
            # Of a second, 1 - waited would do without the waiting; on fewer threads that takes
            # longer, but if it still takes less than the second, they are better.
            if 1 - waited < (free / self.threads) ** SCALING:
                self._lower(free, now.at)
        elif free > self.threads:
            if self._free_since is None:
                self._free_since = now.at
            if now.at - self._free_since >= self._patience:
                self.threads, self._raised_at, self._free_since = free, now.at, None
        else:
            self._free_since = None
        return self.threads

    def _lower(self, threads: int, at: float) -> None:
        hasty = self._raised_at is not None and at - self._raised_at < SETTLED
        self._patience = min(2 * self._patience, MOST_PATIENCE) if hasty else PATIENCE
        self.threads, self._raised_at = threads, None


class ThreadSetting(Protocol):
    """A library's number of threads, which any thread may change; running products keep theirs."""

    def get(self) -> int:
        """The threads of the next product."""
        ...

    def set(self, threads: int) -> None:
        """Gives the next products so many."""
        ...


class BlasThreads:
    """The number of threads of a loaded BLAS."""

    def __init__(self, library: ctypes.CDLL, setter: str, getter: str) -> None:
        self._setter, self._getter = getattr(library, setter), getattr(library, getter)
        self._setter.argtypes, self._setter.restype = [ctypes.c_int], None
        self._getter.argtypes, self._getter.restype = [], ctypes.c_int

    def get(self) -> int:
        """See ``ThreadSetting.get``."""
        return int(self._getter())

    def set(self, threads: int) -> None:
        """See ``ThreadSetting.set``."""
        self._setter(threads)


def blas_threads() -> BlasThreads | None:
    """The setting of the BLAS that serves MLX; None where that is MLX's own or has no setting."""
    path = load_fast_blas().path
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for setter, getter in _NAMES:
        if hasattr(library, setter) and hasattr(library, getter):
            return BlasThreads(library, setter, getter)
    return None


class ThreadWatch:
    """Keeps the number of threads at what the machine has cores for, while it is entered.

    On a thread of its own, because one step beside other processes may take seconds.

    Args:
        setting: None: there is nothing to keep.
        fixed: always so many threads; None: as many as the library and a cgroup's limit allow, and
            fewer while other processes want the cores.
    """

    def __init__(self, setting: ThreadSetting | None, fixed: int | None = None) -> None:
        self._setting = setting
        self._fixed = fixed
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._undisturbed = 0

    def __enter__(self) -> ThreadWatch:
        setting = self._setting
        if setting is None:
            return self
        self._undisturbed = setting.get()
        most = self._undisturbed if self._fixed is None else self._fixed
        if self._fixed is None and (quota := cores.quota()) is not None:
            most = min(most, max(1, round(quota)))
        if most != self._undisturbed:
            setting.set(most)
        log.info("BLAS threads: %d", most)
        if self._fixed is None and most > 1:
            self._thread = threading.Thread(
                target=self._watch, args=(setting, most), name="chairlift-threads", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._setting is not None:
            self._setting.set(self._undisturbed)

    def _watch(self, setting: ThreadSetting, most: int) -> None:
        policy = Policy(most, cores.available())
        try:
            before = cores.usage()
            while not self._ended.wait(INTERVAL):
                now = cores.usage()
                threads = policy.threads
                if policy.decide(before, now) != threads:
                    log.info(
                        "BLAS threads: %d instead of %d; other processes use %.1f of %d cores",
                        *(policy.threads, threads),
                        *((now.others - before.others) / (now.at - before.at), cores.available()),
                    )
                    setting.set(policy.threads)
                before = now
        except (OSError, ValueError) as error:  # not Linux, or a sandbox that hides it
            log.info("BLAS threads stay as they are beside other processes: %s", error)
