"""Jobs for worker processes, their limits and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from chairlift.engine.errors import ChairliftError

# Default limit of a job's CPU time.
CPU_SECONDS = 2.0
# A job may take this many times its CPU time: steps of the engine come first, and on a busy machine
# little of a core is left. The limit of the CPU time ends costly jobs long before.
WALL_FACTOR = 8.0
# Time limit for starting Python, importing modules and loading a vocabulary.
LOAD_SECONDS = 60.0
# Limit of the address space, most of which is never used.
MEMORY_BYTES = 2 << 30
# Limit of the stack. A grammar that compiles within it cannot overflow the engine's threads, which
# may have only 2 MB.
STACK_BYTES = 1 << 20
# A process that keeps more memory than this after a job, beside its fixtures, is replaced.
KEEP_BYTES = 512 << 20
# Fixtures that a process keeps: two for each model that was used lately.
MAX_FIXTURES = 8

_keys = count()


class TooExpensive(ChairliftError):
    """A job was ended because it exceeded a limit. The text says which limit: "takes ..."."""


class WorkerFailed(ChairliftError):
    """A worker process could not start, or its job raised something else than a ChairliftError."""


@dataclass(frozen=True, slots=True)
class Fixture:
    """An object that several jobs need, loaded once per process, outside the limits of a job.

    Attributes:
        make: returns a module-level function and its arguments. A job gets the function's result as
            its first argument. Called on a thread of the pool.
        key: identifies the object in the processes; each fixture has its own.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    key: int = field(default_factory=_keys.__next__, init=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A call of the module-level ``function`` with ``args``, both of which must be picklable.

    Attributes:
        cpu_seconds: limit of its CPU time.
        fixture: passed as the first argument, before ``args``.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    cpu_seconds: float = CPU_SECONDS
    fixture: Fixture | None = None

    @property
    def nbytes(self) -> int:
        """About the memory that its arguments take: that of texts, bytes and arrays."""
        return _nbytes(self.args)


def _nbytes(value: object) -> int:
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))


@dataclass(frozen=True, slots=True)
class LoadFixture:
    """A message to the process: call ``function`` and keep its result as the fixture ``key``.

    Attributes:
        forgotten: the key of a fixture that the process drops before, or None.
    """

    key: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    forgotten: int | None = None


@dataclass(frozen=True, slots=True)
class RunJob:
    """A message to the process: run a job, with the fixture ``key`` if that is not None."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    cpu_seconds: float
    key: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a message.

    Attributes:
        value: what the function returned.
        error: what it raised instead, or None.
        last: the process uses so much memory that it ends now.
    """

    value: Any = None
    error: ChairliftError | None = None
    last: bool = False
