"""The process of a rank other than 0: ``python -m chairlift.engine.process.rank_process [PARENT]``.

Rank 0 starts it, on another host through ssh and then without PARENT, its process id. The process
replays rank 0's turns, and ends when its standard input is closed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import sys
import threading
import traceback
from typing import IO, Any

import msgspec

from chairlift.engine.config import decode_path
from chairlift.engine.errors import ChairliftError
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.logs.setup import set_up_logs
from chairlift.engine.parallel.followers import (
    Failed,
    Proceed,
    Report,
    StartRank,
    Stop,
    ToRank,
)
from chairlift.engine.parallel.journal import Turn
from chairlift.engine.process.libraries import load_libraries
from chairlift.engine.workers.lifeline import follow_parent
from chairlift.engine.workers.wire import receive, send


class Inbox:
    """Receives rank 0's messages on a thread, which ends the process when the pipe is closed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._messages: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self._stream = stream
        threading.Thread(target=self._listen, name="chairlift-rank-0", daemon=True).start()

    def take(self) -> ToRank:
        """Waits for the next message."""
        return self._messages.get()

    def _listen(self) -> None:
        try:
            decoder: Any = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_path)
            while (data := receive(self._stream)) is not None:
                self._messages.put(decoder.decode(data))
        except Exception:  # of any type: without rank 0's messages there is nothing to do
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def main() -> None:
    """Ties this process to rank 0, joins the other ranks, and replays until a ``Stop``."""
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.engine.process.rank_process",
        description="A further rank of an engine, which rank 0 starts; it is of no use without.",
    )
    parser.add_argument("parent", type=int, nargs="?", help="rank 0's process id, on its own host")
    parent = parser.parse_args().parent
    if parent is not None:
        follow_parent(parent)
    # Standard output carries messages, so whatever else is printed goes to standard error.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    inbox = Inbox(os.fdopen(os.dup(sys.stdin.fileno()), "rb"))
    encoder = msgspec.msgpack.Encoder()
    try:
        serve(inbox, lambda message: send(output, encoder.encode(message)))
    except Exception as error:  # of any type: rank 0 has to learn why
        known = isinstance(error, ChairliftError)
        text = str(error) if known else type(error).__name__
        if not known:
            log = logging.getLogger(__name__)
            log.error("this rank has failed: %s", redacted_traceback(error))
        send(output, encoder.encode(Failed(text)))
        sys.exit(1)


def serve(inbox: Inbox, answer: Any) -> None:
    """Starts this rank's part of the engine, and replays turns until a ``Stop``.

    Raises:
        ChairliftError: this rank cannot start, or does not do the same as rank 0.
    """
    start = inbox.take()
    assert isinstance(start, StartRank)
    set_up_logs(start.log_level, start.log_format, f"engine-{start.place.rank}")
    load_libraries(start.place)
    # These imports load MLX, so they come after the BLAS.
    from chairlift.engine.core.background import Background
    from chairlift.engine.core.core import EngineCore
    from chairlift.engine.core.start import start_core
    from chairlift.engine.cpu.thread_count import ThreadWatch, blas_threads
    from chairlift.engine.device import profile
    from chairlift.engine.messages import silent
    from chairlift.engine.parallel.ranks import Group, join
    from chairlift.engine.process.follower import Follower

    def meet(numbers: list[int]) -> list[list[int]]:
        answer(Report(profile.current().kind, numbers))
        proceed = inbox.take()
        if not isinstance(proceed, Proceed):
            sys.exit(0)  # rank 0 cannot start
        return proceed.numbers

    meet([])
    ranks = Group(start.place, join(start.place), meet)
    with ThreadWatch(blas_threads(), ranks.threads(start.config.threads)):

        def make_core(background: Background) -> EngineCore:
            core, _ = start_core(start.config, start.source, silent, ranks, (background,))
            return core

        follower = Follower(make_core)
        gc.freeze()
        while not isinstance(turn := inbox.take(), Stop):
            assert isinstance(turn, Turn)
            follower.take(turn)


if __name__ == "__main__":
    main()
