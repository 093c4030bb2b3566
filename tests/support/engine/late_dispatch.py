"""Finds arrays that are evaluated while another thread may dispatch a step.

MLX's arrays and streams belong to one thread at a time, so on a GPU such an evaluation ends the
process, or changes its memory, some of the times. Here it always fails: a step stays undispatched
until ``wait_dispatched``, and the stream belongs to a thread that evaluates for the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from chairlift.engine.sampling import logprobs

_EVALUATE = ("eval", "async_eval", "synchronize")
_READ = ("item", "tolist", "__bool__", "__float__", "__int__", "__iter__")


class LateDispatch:
    """A ``Dispatcher`` as ``ThreadDispatch`` at its slowest.

    Attributes:
        found: the places that have evaluated something before ``wait_dispatched``.
    """

    threaded = True

    def __init__(self) -> None:
        self.found: list[str] = []
        self._pending: list[mx.array] = []
        self._owner = ThreadPoolExecutor(1)
        self._inside = False

    def dispatch(self, arrays: Sequence[mx.array]) -> None:
        self.wait_dispatched()
        self._pending = list(arrays)

    def wait_dispatched(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            mx.async_eval(pending)

    def stream(self) -> mx.Stream:
        """A stream of the thread that evaluates."""
        return self._owner.submit(mx.new_stream, mx.default_device()).result()

    def evaluating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One of MLX's functions that evaluate, called by the thread that may."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            if self._pending:
                return self._checked(function, *arguments, **options)
            self._inside = True
            try:
                return self._owner.submit(function, *arguments, **options).result()
            finally:
                self._inside = False

        return call

    def _checked(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls a function in this thread, which can only wait for what has been evaluated."""
        try:
            return function(*arguments, **options)
        except RuntimeError:
            frames = traceback.extract_stack()[:-2]
            self.found.append(" < ".join(f"{f.name}:{f.lineno}" for f in reversed(frames[-8:])))
            raise


@contextmanager
def late_dispatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDispatch]:
    """A context in which every evaluation is one that a ``LateDispatch`` checks.

    Make all models and other arrays in it.
    """
    dispatcher = LateDispatch()
    before = mx.default_stream(mx.default_device())
    with monkeypatch.context() as patch:
        for name in _EVALUATE:
            patch.setattr(mx, name, dispatcher.evaluating(getattr(mx, name)))
        for owner, names in ((mx.array, _READ), (np, ("array", "asarray"))):
            for name in names:
                patch.setattr(owner, name, _evaluated_first(getattr(owner, name)))
        # A CPU's functions evaluate the logits, and are for devices where no thread dispatches.
        patch.setattr(logprobs, "host_samples", lambda: False)
        mx.set_default_stream(dispatcher.stream())
        mx.random.seed(0)
        try:
            yield dispatcher
        finally:
            mx.set_default_stream(before)
            mx.random.seed(0)


def _evaluated_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that evaluates its first argument, as MLX does when it reads an array."""

    def call(first: Any, *arguments: Any, **options: Any) -> Any:
        parts = first if isinstance(first, (list, tuple)) else [first]
        if arrays := [part for part in parts if isinstance(part, mx.array)]:
            mx.eval(arrays)
        return function(first, *arguments, **options)

    return call
