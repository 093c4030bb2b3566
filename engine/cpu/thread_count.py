"""Adapts the number of BLAS threads to the cores that other processes leave free.

A product ends when its last thread ends, and a decode step has hundreds of products, each of which
waits for the thread that has no core at the moment. Beside two busy processes on two cores a step
takes ten to fifty times as long on two threads, but only twice as long on one. So while threads
wait for cores, the BLAS gets only as many threads as cores are free. The threads of the compiled
kernel stay: a product there never waits for a thread that has not started (``worker_threads``).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from chairlift.engine.cpu import cores
from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.cpu.compiled import worker_threads
from chairlift.engine.cpu.cores import CoreUsage

log = logging.getLogger(__name__)

# Seconds between two readings of the usage. A reading takes 0.2 ms.
INTERVAL = 0.25
# The speedup of n threads is n to this power (measured on two cores: 1.6).
SCALING = 0.75
# A core counts as free if others, such as the API process and clients, use less than this of it.
SHARED = 0.4
# Cores have to be free for PATIENCE seconds before threads are added. The time doubles, up to
# MAX_PATIENCE, whenever the cores turn out to be taken within SETTLED seconds.
PATIENCE, MAX_PATIENCE, SETTLED = 1.0, 60.0, 10.0
# Names of the setter and the getter in each library. PyPI's scipy-openblas32 adds a prefix.
_NAMES = (
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
)


class Policy:
    """Decides how many threads to use, by arithmetic only.

    Args:
        max_threads: threads on an undisturbed machine.
        available: cores that the process may run on.
    """

    def __init__(self, max_threads: int, available: int) -> None:
        self._max_threads = max_threads
        self._available = available
        self.threads = max_threads
        self._patience = PATIENCE
        self._free_since: float | None = None
        self._raised_at: float | None = None

    def decide(self, before: CoreUsage, now: CoreUsage) -> int:
        """The number of threads to use from now on, given the usage since ``before``."""
        seconds = now.at - before.at
        if seconds <= 0:
            return self.threads
        others = max(0.0, now.others - before.others) / seconds
        waited = max(0.0, now.waited - before.waited) / seconds
        free = min(self._max_threads, max(1, int(self._available - others + SHARED)))
        if free < self.threads:
            self._free_since = None
            # Without waiting, the work of one second would take 1 - waited seconds. Fewer threads
            # take longer for it, but are better if they still need less than that second.
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
        self._patience = min(2 * self._patience, MAX_PATIENCE) if hasty else PATIENCE
        self.threads, self._raised_at = threads, None


class ThreadSetting(Protocol):
    """A library's number of threads. Any thread may change it; running products keep theirs."""

    def get(self) -> int:
        """The number of threads of the next product."""
        ...

    def set(self, threads: int) -> None:
        """Sets the number of threads of later products."""
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
    """The setting of MLX's BLAS; None if that is MLX's own, or has no such setting."""
    path = load_fast_blas().path
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for setter, getter in _NAMES:
        if hasattr(library, setter) and hasattr(library, getter):
            return BlasThreads(library, setter, getter)
    return None


class ThreadWatch:
    """A context manager that adapts the number of the BLAS's threads while it is entered, and sets
    that of the compiled kernel.

    It watches on a separate thread, because a step beside other processes may take seconds.

    Args:
        setting: the library's setting; with None nothing happens.
        fixed: use this many threads always. None: as many as the library and a cgroup's limit
            allow, and fewer while other processes use the cores.
        engines: replicas that share the cores equally, this one included. Does not apply to
            ``fixed``.
    """

    def __init__(
        self, setting: ThreadSetting | None, fixed: int | None = None, engines: int = 1
    ) -> None:
        self._setting = setting
        self._fixed = fixed
        self._engines = engines
        self._ended = threading.Event()
        self._computing = threading.Event()
        self._computing.set()
        self._thread: threading.Thread | None = None
        self._undisturbed = self._workers = 0

    def __enter__(self) -> ThreadWatch:
        setting = self._setting
        if setting is None:
            return self
        self._undisturbed = setting.get()
        max_threads = self._undisturbed if self._fixed is None else self._fixed
        if self._fixed is None and (quota := cores.quota()) is not None:
            max_threads = min(max_threads, max(1, round(quota)))
        if self._fixed is None:
            max_threads = max(1, max_threads // self._engines)
        if max_threads != self._undisturbed:
            setting.set(max_threads)
        self._workers = worker_threads.shared.get()
        worker_threads.shared.set(max_threads)
        log.info("BLAS threads: %d", max_threads)
        if self._fixed is None and max_threads > 1:
            self._thread = threading.Thread(
                target=self._watch,
                args=(setting, max_threads),
                name="chairlift-threads",
                daemon=True,
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
        self._computing.set()
        if self._thread is not None:
            self._thread.join()
        if self._setting is not None:
            self._setting.set(self._undisturbed)
            worker_threads.shared.set(self._workers)
            worker_threads.shared.looks = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is computed, so that the usage is not read."""
        self._computing.clear()
        try:
            yield
        finally:
            self._computing.set()

    def _watch(self, setting: ThreadSetting, max_threads: int) -> None:
        policy = Policy(max_threads, cores.available())
        try:
            before = cores.usage()
            while not self._ended.wait(INTERVAL):
                if not self._computing.is_set():
                    self._computing.wait()
                    before = cores.usage()
                    continue
                now = cores.usage()
                threads = policy.threads
                if policy.decide(before, now) != threads:
                    log.info(
                        "BLAS threads: %d instead of %d; other processes use %.1f of %d cores",
                        *(policy.threads, threads),
                        *((now.others - before.others) / (now.at - before.at), cores.available()),
                    )
                    setting.set(policy.threads)
                    # Looking for jobs takes time from the other processes.
                    worker_threads.shared.looks = policy.threads == max_threads
                before = now
        except (OSError, ValueError) as error:  # not Linux, or a sandbox that hides it
            log.info("BLAS threads stay as they are beside other processes: %s", error)
