"""The main module of a worker process: it answers messages on standard input until that is closed.

A message is a pickled ``LoadFixture`` or ``RunJob``, an answer a pickled ``Answer``. Each is
framed by ``wire``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import pickle
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from chairlift.engine.device.priority import NICENESS
from chairlift.engine.errors import ChairliftError
from chairlift.engine.workers.job import (
    KEEP_BYTES,
    MEMORY_BYTES,
    STACK_BYTES,
    Answer,
    LoadFixture,
    RunJob,
    WorkerFailed,
)
from chairlift.engine.workers.lifeline import follow_parent
from chairlift.engine.workers.wire import receive, send

# The exit code of a process whose job needed more memory than allowed.
NO_MEMORY = 3
_MAX_REASON_CHARS = 300


def main() -> None:
    """Imports modules, then answers. The arguments are the server's process id and the modules."""
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.engine.workers.child",
        description="A worker process of a server, which the server starts for costly requests; "
        "it is of no use without one.",
    )
    parser.add_argument("parent", type=int, help="the server's process id: both end together")
    parser.add_argument("modules", nargs="*", help="modules to import before the first job")
    options = parser.parse_args()
    with suppress(OSError):  # standard input is also closed when the server is killed
        follow_parent(options.parent)
    _limit_memory()
    os.nice(NICENESS)  # all streams wait for the engine's steps, which come first
    # The parent reads answers from standard output. Libraries that print get standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Neither imports nor a large body, which makes millions of objects, leave reference cycles.
    gc.disable()
    for name in options.modules:
        importlib.import_module(name)
    fixtures: dict[int, Any] = {}
    max_bytes = _used_bytes() + KEEP_BYTES
    answer = Answer()
    send(answers, pickle.dumps(answer))
    while not answer.last and (data := receive(sys.stdin.buffer)) is not None:
        message = pickle.loads(data)
        used = _used_bytes()
        answer, reply = _answer(message, fixtures, max_bytes)
        send(answers, reply)
        if isinstance(message, LoadFixture) and answer.error is None:
            max_bytes += max(0, _used_bytes() - used)


def _answer(
    message: LoadFixture | RunJob, fixtures: dict[int, Any], max_bytes: int
) -> tuple[Answer, bytes]:
    """The answer and its pickle. A process that uses more than ``max_bytes`` then is to end."""
    try:
        if isinstance(message, RunJob):
            signal.setitimer(signal.ITIMER_PROF, message.cpu_seconds)
        value = _value(message, fixtures)
        last = isinstance(message, RunJob) and _used_bytes() > max_bytes
        answer = Answer(value, last=last)
        return answer, pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        os._exit(NO_MEMORY)
    except Exception as error:
        answer = Answer(error=_known(error), last=_used_bytes() > max_bytes)
        return answer, pickle.dumps(answer)
    finally:
        # NOTE: SIGPROF has no handler, so the kernel ends the process in whatever code it is.
        signal.setitimer(signal.ITIMER_PROF, 0)


def _value(message: LoadFixture | RunJob, fixtures: dict[int, Any]) -> Any:
    if isinstance(message, LoadFixture):
        if message.forgotten is not None:
            fixtures.pop(message.forgotten, None)
        fixtures[message.key] = message.function(*message.args)
        return None
    fixture = () if message.key is None else (fixtures[message.key],)
    return message.function(*fixture, *message.args)


def _known(error: Exception) -> ChairliftError:
    """The error to report, without tracebacks: their frames refer to the message and the answer.

    These refer to the error, and no cycle is ever freed.
    """
    if isinstance(error, ChairliftError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return WorkerFailed(f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS])


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems refuse these limits
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))


def _used_bytes() -> int:
    """The memory that the process uses; without /proc, the maximum that it has used so far."""
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
