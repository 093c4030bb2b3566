"""Recognizes root mean square norms, which MLX's graph shows as eight operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from chairlift.engine.cpu.compiled.jobs import NoProgramError
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.graph.graph import Array, Primitive, Value
from chairlift.engine.cpu.graph.numpy_operations import SUM
from chairlift.engine.cpu.program_builder import ProgramBuilder


class Operations(Protocol):
    """The part of ``Lowering`` that norms need."""

    kept: list[Array]

    @property
    def program(self) -> ProgramBuilder:
        """The program to which jobs are added."""
        ...

    def array(self, value: Value) -> Array:
        """The array of a value, after the steps that compute it have been added."""
        ...

    def constant(self, value: Value) -> Array | None:
        """The array of a value that is the same in all calls; None if it is not."""
        ...

    def producer(self, value: Value, kind: str) -> Primitive | None:
        """The primitive that computes a value, if it is of this kind."""
        ...

    def new(self, shape: Sequence[int]) -> Array:
        """Memory for an array that a step writes."""
        ...


def norm_of(lowering: Operations, primitive: Primitive) -> Array | None:
    """Adds the job of a norm whose last operation is this one.

    Returns:
        The norm; None if the operation is not the last one of a norm, or there is no job for it.
    """
    if primitive.kind != "Multiply":
        return None
    x = _normed(lowering, primitive)
    weight: Floats | None = None
    found = x
    if x is None:
        for one, other in (primitive.inputs, primitive.inputs[::-1]):
            inner = lowering.producer(one, "Multiply")
            found = None if inner is None else _normed(lowering, inner)
            weight = _weight(lowering, other)
            if found is not None and weight is not None:
                break
        else:
            return None
    assert found is not None
    value, eps = found
    array = lowering.array(value)
    numbers = array.shape[-1]
    if weight is None:
        weight = np.ones(numbers, np.float32)
    lines = _lines(array)
    if lines is None or weight.shape != (numbers,):
        return None
    into = lowering.new(array.shape)
    try:
        lowering.program.norm(lines, weight, eps, into.reshape(lines.shape))
    except NoProgramError:
        return None
    lowering.kept += [weight, eps]
    return into


def _lines(x: Array) -> Floats | None:
    """``[tokens, ..., numbers]`` as ``[tokens, heads, numbers]``; None if that needs a copy."""
    view = x.view()
    try:
        view.shape = len(x), -1, x.shape[-1]
    except AttributeError:
        return None
    adjacent = view.strides[2] == x.itemsize and (
        view.shape[1] == 1 or view.strides[1] == x.shape[-1] * x.itemsize
    )
    return (view[:, 0] if view.shape[1] == 1 else view) if adjacent else None


def _weight(lowering: Operations, value: Value) -> Floats | None:
    """The vector that is broadcast to a value; None if it depends on anything."""
    broadcast = lowering.producer(value, "Broadcast")
    if broadcast is None or len(broadcast.inputs[0].shape) != 1:
        return None
    weight = lowering.constant(broadcast.inputs[0])
    return None if weight is None else np.ascontiguousarray(weight)


def _normed(lowering: Operations, primitive: Primitive) -> tuple[Value, Floats] | None:
    """The input of a norm without weights, and the number that it adds to the mean."""
    for value, other in (primitive.inputs, primitive.inputs[::-1]):
        eps = _inverse_root_of_mean(lowering, other, value)
        if eps is not None:
            return value, eps
    return None


def _inverse_root_of_mean(lowering: Operations, value: Value, x: Value) -> Floats | None:
    """The number that is added to the mean square of ``x``, if ``value`` is its inverse root."""
    broadcast = lowering.producer(value, "Broadcast")
    root = None if broadcast is None else lowering.producer(broadcast.inputs[0], "Sqrt")
    if root is None or not root.state[0]:
        return None
    mean = lowering.producer(root.inputs[0], "Add")
    if mean is None:
        return None
    for one, other in (mean.inputs, mean.inputs[::-1]):
        eps = lowering.constant(other)
        if eps is not None and np.ptp(eps) == 0 and _is_mean_square(lowering, one, x):
            return np.array(eps.reshape(-1)[:1], np.float32)
    return None


def _is_mean_square(lowering: Operations, value: Value, x: Value) -> bool:
    scaled = lowering.producer(value, "Multiply")
    if scaled is None:
        return False
    for one, other in (scaled.inputs, scaled.inputs[::-1]):
        share = lowering.constant(other)
        total = lowering.producer(one, "Reduce")
        if share is None or total is None or total.state[0] != SUM:
            continue
        square = lowering.producer(total.inputs[0], "Square")
        last = [*total.state[1]] == [len(x.shape) - 1]
        if square is not None and square.inputs[0].name == x.name and last:
            return bool(np.isclose(share.reshape(-1)[0] * x.shape[-1], 1))
    return False
