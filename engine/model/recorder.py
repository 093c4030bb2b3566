"""Records what a layer computes, so that ``engine.cpu.graph`` can compute it in another way.

MLX's graph does not show what a layer computes outside of MLX, such as attention and products of
the host. While a layer is recorded, such an operation is not computed: it becomes a ``HostCall``,
and an array stands in for its result.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx


class HostCall(NamedTuple):
    """An operation that is not MLX's.

    Attributes:
        operation: says what is computed; ``engine.cpu.graph.host_operations`` has the kinds.
        inputs: the arrays that it reads.
        shape: its result's.
    """

    operation: Any
    inputs: Sequence[mx.array]
    shape: tuple[int, ...]


class _Recording:
    def __init__(self, stand_ins: Sequence[mx.array] | None) -> None:
        self.calls: list[HostCall] = []
        self._stand_ins = stand_ins

    def add(self, call: HostCall) -> mx.array:
        self.calls.append(call)
        if self._stand_ins is None:
            return mx.zeros(call.shape)
        return self._stand_ins[len(self.calls) - 1]


class _Current(threading.local):
    recording: _Recording | None = None
    observed = False


def record(operation: Any, inputs: Sequence[mx.array], shape: Sequence[int]) -> mx.array | None:
    """Adds a call to the recording of this thread.

    Returns:
        What stands in for the result; None if nothing is being recorded.
    """
    recording = _current.recording
    return None if recording is None else recording.add(HostCall(operation, inputs, tuple(shape)))


@contextmanager
def recording(stand_ins: Sequence[mx.array] | None = None) -> Iterator[list[HostCall]]:
    """Context in which this thread's operations of the host are recorded.

    Args:
        stand_ins: what stands in for the results, in the order of the calls; None: new zeros.
    """
    before, _current.recording = _current.recording, _Recording(stand_ins)
    try:
        yield _current.recording.calls
    finally:
        _current.recording = before


def is_recording() -> bool:
    """Whether this thread's operations of the host are recorded."""
    return _current.recording is not None


@contextmanager
def observed() -> Iterator[None]:
    """Context in which this thread's layers run their own code, because something watches that."""
    before, _current.observed = _current.observed, True
    try:
        yield
    finally:
        _current.observed = before


def is_observed() -> bool:
    """Whether this thread's layers have to run their own code."""
    return _current.observed or is_recording()


_current = _Current()
