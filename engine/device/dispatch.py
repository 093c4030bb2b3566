"""Dispatches graphs to the device: in the caller's thread, or in one of its own.

MLX takes milliseconds to launch the operations of a step, and waits if the device is many behind,
but needs no Python for that. In a thread of its own this happens while the host reads the previous
step and prepares the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

import mlx.core as mx

from chairlift.engine.device import profile


class Dispatcher(Protocol):
    """Dispatches graphs in the order of the calls.

    Attributes:
        threaded: ``dispatch`` returns before MLX has launched the graph's operations.
    """

    threaded: bool

    def dispatch(self, arrays: Sequence[mx.array]) -> None:
        """Dispatches the graph of these arrays, without waiting for its results.

        Raises:
            Exception: of any type; as ``wait_dispatched``.
        """
        ...

    def wait_dispatched(self) -> None:
        """Waits until MLX has launched everything.

        Call it before this thread evaluates anything, or reads an array that a dispatched graph
        reads: MLX's streams and arrays belong to one thread at a time. New graphs may be built
        meanwhile, and a result that no dispatched graph reads may be waited for.

        Raises:
            Exception: of any type; the last graph could not be dispatched.
        """
        ...


class CallerDispatch:
    """Dispatches in the caller's thread."""

    threaded = False

    def dispatch(self, arrays: Sequence[mx.array]) -> None:
        mx.async_eval(arrays)

    def wait_dispatched(self) -> None:
        """Does nothing: ``dispatch`` has launched everything."""


class ThreadDispatch:
    """Dispatches in a thread of its own; the other methods belong to the thread that makes it.

    It creates a stream that both threads may use, and makes it the current thread's default. So
    create the dispatcher before any array.
    """

    threaded = True

    def __init__(self) -> None:
        mx.set_default_stream(mx.new_thread_unsafe_stream(mx.default_device()))
        self._graphs: SimpleQueue[list[mx.array]] = SimpleQueue()
        self._begun: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[Exception | None] = SimpleQueue()
        self._busy = False
        threading.Thread(target=self._run, name="dispatch", daemon=True).start()

    def dispatch(self, arrays: Sequence[mx.array]) -> None:
        self.wait_dispatched()
        self._busy = True
        # NOTE: the graph's Python objects live until it is launched. MLX changes its arrays
        # meanwhile, which must not be destroyed by this thread.
        self._graphs.put(list(arrays))
        # This thread lets the other one have the interpreter until MLX releases it. Otherwise that
        # one could wait for the interpreter's switch interval, 5 ms.
        self._begun.get()

    def wait_dispatched(self) -> None:
        if not self._busy:
            return
        error = self._ended.get()
        self._busy = False
        if error is not None:
            try:
                raise error
            finally:
                del error  # a cycle with its traceback would keep the pages of a step

    def _run(self) -> None:
        while True:
            arrays = self._graphs.get()
            error = None
            self._begun.put(None)
            try:
                mx.async_eval(arrays)
            except Exception as caught:  # of any type: the other thread raises it
                error = caught
            del arrays
            self._ended.put(error)


def make_dispatcher(ranks: int = 1) -> Dispatcher:
    """The current device's dispatcher.

    Args:
        ranks: the processes that compute the model together. Several launch the collectives of
            their steps in the callers' threads.
    """
    in_thread = profile.current().dispatches_in_thread and ranks == 1
    return ThreadDispatch() if in_thread else CallerDispatch()
