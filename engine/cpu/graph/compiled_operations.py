"""Adds the jobs of MLX's operations for which there are compiled functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chairlift.engine.cpu.compiled.compiled_maps import mapped, summed
from chairlift.engine.cpu.compiled.jobs import Run
from chairlift.engine.cpu.graph.graph import Array
from chairlift.engine.cpu.graph.numpy_operations import SUM, State

# The functions of ``compiled_maps`` by the names of MLX's classes.
_MAPS = {
    "Abs": "absolute",
    "Add": "add",
    "Divide": "divide",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Multiply": "multiply",
    "Negative": "negative",
    "Sigmoid": "sigmoid",
    "Square": "square",
    "Subtract": "subtract",
    "Tanh": "tanh",
}
# Those of numbers to a power.
_POWERS = {2: "square", 3: "cube"}
# Sums of at most so many numbers of an axis that is not the last are additions.
_FEW = 16


def add_jobs(
    add: Run, kind: str, state: State, inputs: Sequence[Array], into: Array, last_is_constant: bool
) -> bool:
    """Adds the jobs of an operation.

    Args:
        kind, state: see ``Primitive``.
        into: the memory of its result.
        last_is_constant: whether the last input is the same in all calls.

    Returns:
        False if there are none; what was added then writes ``into``, which is to be written again.
    """
    if kind == "Sqrt":
        return mapped("inverse_root" if state[0] else "root", inputs, into, add)
    if kind == "Power":
        powers = np.unique(inputs[1]).tolist() if last_is_constant else []
        known = len(powers) == 1 and powers[0] in _POWERS
        return known and mapped(_POWERS[powers[0]], inputs[:1], into, add)
    if kind in _MAPS:
        return mapped(_MAPS[kind], inputs, into, add)
    if kind == "Reduce" and state[0] == SUM and len(state[1]) == 1:
        [x], [axis] = inputs, state[1]
        if axis == x.ndim - 1:
            return summed(x, into, add)
        return x.shape[axis] <= _FEW and _added(add, np.moveaxis(x, axis, 0), into, axis)
    if kind == "Concatenate":
        ends = np.cumsum([each.shape[state[0]] for each in inputs])[:-1]
        parts = np.split(into, ends, axis=state[0])
        copies = zip(inputs, parts, strict=True)
        return all(mapped("copy", [each], part, add) for each, part in copies)
    return False


def _added(add: Run, parts: Array, into: Array, axis: int) -> bool:
    """Adds the jobs that add arrays: ``into`` has an axis of one in place of theirs."""
    total = into.squeeze(axis)
    if len(parts) == 1:
        return mapped("copy", [parts[0]], total, add)
    return mapped("add", [parts[0], parts[1]], total, add) and all(
        mapped("add", [total, part], total, add) for part in parts[2:]
    )
