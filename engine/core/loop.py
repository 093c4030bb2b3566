"""The engine's loop: receives messages, runs a step, sends its output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from chairlift.engine.config import EngineConfig
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.start import start_core
from chairlift.engine.cpu.thread_count import ThreadWatch, blas_threads
from chairlift.engine.errors import ChairliftError, EngineDead
from chairlift.engine.hub.load_errors import first_line, wrong_field
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import (
    Abort,
    FromEngine,
    LoadAdapter,
    Shutdown,
    StartFailed,
    Submit,
    ToEngine,
    UnloadAdapter,
    Withdraw,
)
from chairlift.engine.model.architecture import argument_class
from chairlift.engine.parallel.ranks import ALONE, Ranks
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

# Less than ``process.child.STOP_SECONDS``, after which the process is killed.
CLOSE_SECONDS = 8.0


class Inbox(Protocol):
    """Delivers messages to the engine."""

    def receive(self, block: bool) -> Iterable[ToEngine]:
        """Returns all messages that have arrived; ``block`` waits for one, or for ``wake``."""
        ...

    def wake(self) -> None:
        """Ends a waiting ``receive``, or the next ``receive`` that would wait. Thread-safe."""
        ...


def run(
    config: EngineConfig,
    source: ModelSource,
    inbox: Inbox,
    send: Callable[[FromEngine], None],
    on_compute: Callable[[list[Sequence]], None] = lambda sequences: None,
    ranks: Ranks = ALONE,
) -> None:
    """Starts an engine and serves until it receives ``Shutdown``.

    Args:
        on_compute: called with the sequences about to run, before any work is dispatched.
        ranks: those that compute the model together.

    Raises:
        EngineDead: a whole step has failed, so no single request can be blamed. The cause is
            logged.
    """
    threads = ranks.threads(config.threads)
    with ThreadWatch(blas_threads(), threads, config.host_engines) as watch:
        try:
            core, info = start_core(config, source, send, ranks)
        except ChairliftError as error:
            send(StartFailed(str(error)))
            return
        except Exception as error:
            # A model's files can be wrong in ways that only its first computation shows.
            cause = first_line(error)
            if (fault := wrong_field(source.path, argument_class(source.path))) is not None:
                cause = f"in config.json, {fault}: {cause}"
            log.debug("the start has failed: %s", redacted_traceback(error))
            send(StartFailed(f"{source.path}: the model cannot be started: {cause}"))
            return
        core.on_compute = on_compute
        core.on_due(inbox.wake)
        send(info)
        try:
            serve(core, inbox, send, watch.paused)
        except Exception as error:  # of any type; its message may quote a user
            log.error("a step has failed: %s", redacted_traceback(error))
            raise EngineDead(f"a step has failed: {type(error).__name__}") from None
        core.close(CLOSE_SECONDS)


def serve(
    core: EngineCore,
    inbox: Inbox,
    send: Callable[[FromEngine], None],
    idle: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Serves until it receives ``Shutdown``. An idle engine sleeps in ``receive``.

    Args:
        idle: makes a context for the time in which it sleeps.
    """
    while True:
        if core.idle:
            with idle():
                messages = inbox.receive(block=True)
        else:
            messages = inbox.receive(block=False)
        for message in messages:
            match message:
                case Submit():
                    core.submit(message)
                case Abort():
                    core.abort(message)
                case Withdraw():
                    core.withdraw(message.request_id)
                case LoadAdapter():
                    send(core.load_adapter(message))
                case UnloadAdapter():
                    core.unload_adapter(message.key)
                case Shutdown():
                    return
        if not core.idle:
            send(core.step())
