"""Jobs for worker processes, their limits and their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chairlift.engine.errors import ChairliftError

# The CPU time of a job, unless it says otherwise.
CPU_SECONDS = 2.0
# A machine whose cores are busy gives a job its CPU time this much later.
WALL_FACTOR = 5.0
# Python's start, its imports, and a vocabulary.
LOAD_SECONDS = 60.0
# Address space, most of which is never used.
MEMORY_BYTES = 2 << 30
# What compiles here must not overflow the engine's threads, which may have no more than 2 MB.
STACK_BYTES = 1 << 20
# A process that keeps more memory than this after a job, beside its fixtures, is replaced.
KEEP_BYTES = 512 << 20


class TooExpensive(ChairliftError):
    """A job was ended because it exceeded a limit; the text says which, as in "takes ..."."""


class WorkerFailed(ChairliftError):
    """The process of a job could not start, or the job raised what it must not raise."""


@dataclass(frozen=True, slots=True)
class Fixture:
    """An object that several jobs need, loaded once per process, outside the limits of a job.

    ``make`` gives a module-level function and its arguments; a job gets the function's result
    as its first argument. It is called in a thread. Fixtures of one ``key`` are the same.
    """

    key: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Job:
    """Calls the module-level ``function`` with ``args``, both of which pickle can write."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    cpu_seconds: float = CPU_SECONDS
    fixture: Fixture | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A message to the process: calls ``function`` and keeps the result as ``key``."""

    key: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A message to the process: does a job with the fixture ``key``, None: without one."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    cpu_seconds: float
    key: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a message: ``value``, or an error.

    ``last``: the process has used so much memory that it ends now.
    """

    value: Any = None
    error: ChairliftError | None = None
    last: bool = False
