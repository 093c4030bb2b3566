"""Jobs of worker processes, in a module that imports little: each process imports it anew."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

from chairlift.engine.errors import GrammarError, RequestError

# A process imports them before its first job: the time of an import is no job's.
MODULES = (__name__,)


_retained: list[bytes] = []


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def identity(value: Any) -> Any:
    return value


def hang_in_native_code() -> None:
    re.match(r"(a*)*b", "a" * 40)


def take_memory(size: int) -> int:
    return len(b"x" * size)


def retain(size: int) -> int:
    _retained.append(b"x" * size)
    return os.getpid()


def refuse(kind: str) -> None:
    raise RequestError("no", "field") if kind == "request" else GrammarError("bad")


def refuse_all(data: bytes) -> None:
    """Raises an error with a cause, as the frames of both refer to ``data``."""
    try:
        raise ValueError(len(data))
    except ValueError as error:
        raise GrammarError("bad") from error


def bug() -> None:
    raise KeyError("a bug")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_first(path: str, times: int) -> str:
    """Kills its process the first ``times`` times, which it counts in a file."""
    with open(path, "a+b") as file:
        file.write(b".")
        if file.tell() <= times:
            file.flush()
            die()
    return "alive"


def print_much() -> str:
    os.write(1, b"x" * 100_000)
    print("more")
    return "done"


def load_fixture(value: str) -> tuple[str, int]:
    return value, os.getpid()


def with_fixture(fixture: tuple[str, int], other: int) -> tuple[str, bool, int]:
    return fixture[0], fixture[1] == os.getpid(), other


def wait_with(seconds: float, data: list[bytes]) -> None:
    """Waits, with some data."""
    time.sleep(seconds)


def wait(seconds: float) -> float:
    time.sleep(seconds)
    return time.monotonic()
