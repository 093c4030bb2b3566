"""Jobs of compiled functions: one at a time, or several in one call; see ``llvm.jobs``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import worker_threads
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function
from chairlift.engine.cpu.compiled.llvm.jobs import (
    ARGUMENTS,
    DIVISOR,
    FINISHED,
    FUNCTION,
    SIZE,
    TAKEN,
)
from chairlift.engine.cpu.views import Scratch, aligned

# One line for each job.
Table = NDArray[np.int64]
# Jobs of fewer weights, or that compute or read fewer other numbers, end before another thread has
# begun.
MIN_SHARED_WEIGHTS, MIN_SHARED = 1 << 17, 1 << 13
# Divisors of a thread's share of the parts: of those that are left, which it takes at a time, and
# of all, which is the least that it takes.
_FRACTION, _LEAST = 2, 8


class NoProgramError(Exception):
    """There is no compiled function for an operation."""


class Run(Protocol):
    """Computes a job now, or as part of a program."""

    def __call__(self, function: Function, *arguments: int, parts: int, is_shared: bool) -> object:
        """Calls a function of a kernel.

        Args:
            arguments: the function's; addresses of memory that stays until the job is computed.
            parts: the parts of the job.
            is_shared: whether all threads take parts.
        """
        ...


def run_shared(function: Function, *arguments: int, parts: int, is_shared: bool) -> None:
    """See ``Run``; computes the job at once."""
    threads = worker_threads.shared.get() if is_shared else 1
    job = _job.array(np.int64, SIZE)
    _fill(job, _Job(function, arguments, parts, is_shared), threads)
    address = job.ctypes.data
    if threads == 1 or not worker_threads.shared.run(address):
        function.call(address)


class _Job(NamedTuple):
    """The arguments of ``Run``."""

    function: Function
    arguments: Sequence[int]
    parts: int
    is_shared: bool


class Program:
    """Jobs that are computed one after the other, in one call.

    A call from Python takes as long as a small product, and a decoder layer has a dozen jobs.

    Attributes:
        threads: for how many the jobs were written; 0 before.
    """

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._table: Table | None = None
        self.threads = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, function: Function, *arguments: int, parts: int, is_shared: bool) -> int:
        """See ``Run``; ``run`` computes the job. Returns its number."""
        self._jobs.append(_Job(function, arguments, parts, is_shared))
        self._table = None
        return len(self._jobs) - 1

    def extend(self, other: Program) -> None:
        """Adds the jobs of another program."""
        self._jobs += other._jobs
        self._table = None

    def change(
        self, number: int, function: Function, *arguments: int, parts: int, is_shared: bool
    ) -> None:
        """Replaces a job; see ``Run``."""
        job = self._jobs[number] = _Job(function, arguments, parts, is_shared)
        if self._table is not None:
            _fill(self._table[number], job, self.threads)

    def set_parts(self, number: int, parts: int) -> None:
        """Changes the parts of a job."""
        job = self._jobs[number] = self._jobs[number]._replace(parts=parts)
        if self._table is not None:
            _fill(self._table[number], job, self.threads)

    def run(self) -> None:
        """Computes all jobs."""
        threads = worker_threads.shared.get()
        if self._table is None or threads != self.threads:
            self.write(_table(len(self)) if self._table is None else self._table, threads)
        assert self._table is not None
        worker_threads.shared.run_all(self._table.ctypes.data, len(self))

    def write(self, table: Table, threads: int) -> None:
        """Writes the jobs to a table, where ``change`` changes them from now on."""
        self._table, self.threads = table, threads
        for line, job in zip(table, self._jobs, strict=True):
            _fill(line, job, threads)


class ProgramChain:
    """Programs of which any that follow each other are computed in one call."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._starts = np.array([*accumulate(map(len, programs), initial=0)])
        self._table = _table(int(self._starts[-1]))
        self._address = self._table.ctypes.data
        for number in range(len(programs)):
            self._write(number, worker_threads.shared.get())

    def prepare(self) -> None:
        """Writes the programs again that were written for another number of threads."""
        threads = worker_threads.shared.get()
        for number, program in enumerate(self._programs):
            if program.threads != threads:
                self._write(number, threads)

    def repeat(self, number: int, start: int, stop: int, *own: tuple[int, Sequence[int]]) -> None:
        """Copies a job of program ``start`` to the same place of the programs behind it, as far as
        before ``stop``. A program may change it later. Call ``prepare`` before.

        Args:
            number: the job's, in each of the programs.
            own: the number of an argument that differs, and its values in the programs behind
                ``start``.
        """
        lines = self._starts[start:stop] + number
        self._table[lines[1:]] = self._table[lines[0]]
        for argument, values in own:
            self._table[lines[1:], ARGUMENTS + argument] = values

    def run(self, start: int, stop: int) -> None:
        """Computes the programs from ``start`` to before ``stop``. Call ``prepare`` before."""
        first, end = self._starts[start : stop + 1 : stop - start].tolist()
        address = self._address + first * SIZE * self._table.itemsize
        worker_threads.shared.run_all(address, end - first)

    def _write(self, number: int, threads: int) -> None:
        start, stop = self._starts[number : number + 2]
        self._programs[number].write(self._table[start:stop], threads)


def _table(jobs: int) -> Table:
    """An uninitialized table of jobs, as ``llvm.jobs`` reads it."""
    return aligned(jobs * SIZE * np.dtype(np.int64).itemsize).view(np.int64).reshape(-1, SIZE)


def _fill(line: Table, job: _Job, threads: int) -> None:
    """Writes a job as ``llvm.jobs`` reads it; its counters are zero."""
    parts, is_shared = job.parts, job.is_shared and threads > 1
    least, divisor = (
        (max(1, parts // (threads * _LEAST)), threads * _FRACTION) if is_shared else (parts, 0)
    )
    line[FUNCTION : DIVISOR + 1] = job.function.address, parts, least, divisor
    line[TAKEN] = line[FINISHED] = 0
    line[ARGUMENTS : ARGUMENTS + len(job.arguments)] = job.arguments


_job = Scratch()
