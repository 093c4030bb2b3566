"""MLX's operations in NumPy, by the names of MLX's classes.

``VIEWS`` need no computation: their results are views of their inputs, or copies where NumPy needs
one. ``OPERATIONS`` write their result into an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.graph.graph import Array

State = Sequence[Any]
# Called with the settings, the inputs and the result's memory.
Compute = Callable[[State, Sequence[Array], Array], object]

DTYPES: dict[mx.Dtype, type[Any]] = {
    mx.float32: np.float32,
    mx.int32: np.int32,
    mx.uint32: np.uint32,
    mx.int64: np.int64,
    mx.bool_: np.bool_,
}
# MLX's numbers of reductions.
SUM, PRODUCT, MINIMUM, MAXIMUM = 2, 3, 4, 5
# What MLX's numbers mean for slices that change; the next one is that they are replaced.
_SLICE_CHANGES = (np.maximum, np.minimum, np.add, np.multiply)
# MLX's numbers of operations with bits, and of logarithms.
_BITS: tuple[Any, ...] = (
    np.bitwise_and,
    np.bitwise_or,
    np.bitwise_xor,
    np.left_shift,
    np.right_shift,
)
_LOGARITHMS = {0: np.log2, 1: np.log10, 2: np.log}
_REDUCTIONS: dict[int, Any] = {
    0: np.logical_and,
    1: np.logical_or,
    SUM: np.add,
    PRODUCT: np.multiply,
    MINIMUM: np.minimum,
    MAXIMUM: np.maximum,
}


def _slices(state: State, x: Array) -> Array:
    starts, stops, steps = state
    result: Array = x[tuple(slice(*each) for each in zip(starts, stops, steps, strict=True))]
    return result


# Each takes the settings, the input and the result's shape.
VIEWS: dict[str, Callable[[State, Array, tuple[int, ...]], Array]] = {
    "Reshape": lambda state, x, shape: x.reshape(shape),
    "Flatten": lambda state, x, shape: x.reshape(shape),
    "Unflatten": lambda state, x, shape: x.reshape(shape),
    "Squeeze": lambda state, x, shape: x.reshape(shape),
    "ExpandDims": lambda state, x, shape: x.reshape(shape),
    "Transpose": lambda state, x, shape: x.transpose(state[0]),
    "Broadcast": lambda state, x, shape: np.broadcast_to(x, shape),
    "Slice": lambda state, x, shape: _slices(state, x),
    "StopGradient": lambda state, x, shape: x,
    "Copy": lambda state, x, shape: x,
}


def _ufunc(function: Any) -> Compute:
    return lambda state, inputs, into: function(*inputs, out=into, casting="unsafe")


def _gathered(state: State, inputs: Sequence[Array], into: Array) -> None:
    x, places = inputs
    [axis], _ = state
    into[...] = np.moveaxis(x, axis, 0)[places].reshape(into.shape)


def one_line(state: State, x: Array, place: int) -> Array:
    """The result of ``Gather`` with one place of an axis: a view."""
    [axis], _ = state
    place %= x.shape[axis]
    return x[(*[slice(None)] * axis, slice(place, place + 1))]


def gathers_lines(state: State, inputs: Sequence[Array]) -> bool:
    """Whether ``Gather`` takes all numbers at places of one axis."""
    axes, sizes = state
    x = inputs[0].shape
    return len(axes) == 1 and all(
        size == (1 if axis in axes else x[axis]) for axis, size in enumerate(sizes)
    )


def _slice_changed(state: State, inputs: Sequence[Array], into: Array) -> None:
    kind, *where = state
    x, new = inputs
    into[...] = x
    part = _slices(where, into)
    part[...] = _SLICE_CHANGES[kind](part, new) if kind < len(_SLICE_CHANGES) else new


def _taken(state: State, inputs: Sequence[Array], into: Array) -> None:
    x, places = inputs
    into[...] = np.take_along_axis(x, places.astype(np.int64), axis=state[0])


def _put(state: State, inputs: Sequence[Array], into: Array) -> None:
    x, places, values = inputs
    into[...] = x
    np.put_along_axis(into, places.astype(np.int64), values, axis=state[1])


def _softmax(state: State, inputs: Sequence[Array], into: Array) -> None:
    [x] = inputs
    np.subtract(x, x.max(axis=-1, keepdims=True), out=into)
    np.exp(into, out=into)
    into /= into.sum(axis=-1, keepdims=True)


def _reduced(state: State, inputs: Sequence[Array], into: Array) -> None:
    kind, axes = state
    _REDUCTIONS[kind].reduce(inputs[0], axis=tuple(axes), keepdims=True, out=into)


def _sigmoid(state: State, inputs: Sequence[Array], into: Array) -> None:
    with np.errstate(over="ignore"):  # infinity gives 0
        np.exp(-inputs[0], out=into)
    into += 1
    np.divide(1, into, out=into)


def _multiplied(state: State, inputs: Sequence[Array], into: Array) -> None:
    np.matmul(inputs[0], inputs[1], out=into)


def _multiplied_and_added(state: State, inputs: Sequence[Array], into: Array) -> None:
    x, weight, other = inputs
    alpha, beta = state
    np.matmul(x, weight, out=into)
    into *= np.float32(alpha)
    into += np.float32(beta) * other


def _padded(state: State, inputs: Sequence[Array], into: Array) -> None:
    axes, lows, _ = state
    x, filler = inputs
    inner = [slice(None)] * into.ndim
    for axis, low in zip(axes, lows, strict=True):
        inner[axis] = slice(low, low + x.shape[axis])
    into[...] = filler
    into[tuple(inner)] = x


def _root(state: State, inputs: Sequence[Array], into: Array) -> None:
    np.sqrt(inputs[0], out=into)
    if state[0]:
        np.divide(1, into, out=into)


def _set(function: Callable[[State, Sequence[Array]], Array]) -> Compute:
    def compute(state: State, inputs: Sequence[Array], into: Array) -> None:
        into[...] = function(state, inputs)

    return compute


def _by_mlx(function: Callable[[mx.array], mx.array]) -> Compute:
    """NumPy has no such function."""
    return _set(lambda state, inputs: np.array(function(mx.array(inputs[0]))))


OPERATIONS: dict[str, Compute] = {
    "Abs": _ufunc(np.abs),
    "Add": _ufunc(np.add),
    "AddMM": _multiplied_and_added,
    "Arange": _set(lambda state, inputs: np.arange(*state)),
    "ArgPartition": _set(lambda state, inputs: np.argpartition(inputs[0], state[0], state[1])),
    "ArgReduce": _set(
        lambda state, inputs: (np.argmax if state[0] else np.argmin)(
            inputs[0], axis=state[1], keepdims=True
        )
    ),
    "ArgSort": _set(lambda state, inputs: np.argsort(inputs[0], state[0], kind="stable")),
    "AsType": _set(lambda state, inputs: inputs[0]),
    "BitwiseBinary": lambda state, inputs, into: _BITS[state[0]](*inputs, out=into),
    "Concatenate": lambda state, inputs, into: np.concatenate(inputs, axis=state[0], out=into),
    "Cos": _ufunc(np.cos),
    "Divide": _ufunc(np.divide),
    "Equal": _ufunc(np.equal),
    "Erf": _by_mlx(mx.erf),
    "Exp": _ufunc(np.exp),
    "Expm1": _ufunc(np.expm1),
    "Floor": _ufunc(np.floor),
    "Gather": _gathered,
    "GatherAxis": _taken,
    "Greater": _ufunc(np.greater),
    "GreaterEqual": _ufunc(np.greater_equal),
    "Less": _ufunc(np.less),
    "LessEqual": _ufunc(np.less_equal),
    "Log": _set(lambda state, inputs: _LOGARITHMS[state[0]](inputs[0])),
    "Log1p": _ufunc(np.log1p),
    "LogAddExp": _ufunc(np.logaddexp),
    "LogicalAnd": _ufunc(np.logical_and),
    "LogicalNot": _ufunc(np.logical_not),
    "LogicalOr": _ufunc(np.logical_or),
    "Matmul": _multiplied,
    "Maximum": _ufunc(np.maximum),
    "Minimum": _ufunc(np.minimum),
    "Multiply": _ufunc(np.multiply),
    "Negative": _ufunc(np.negative),
    "NotEqual": _ufunc(np.not_equal),
    "Partition": _set(lambda state, inputs: np.partition(inputs[0], state[0], state[1])),
    "Pad": _padded,
    "Power": _ufunc(np.power),
    "Reduce": _reduced,
    "ScatterAxis": _put,
    "Round": _ufunc(np.rint),
    "Select": _set(lambda state, inputs: np.where(*inputs)),
    "Sigmoid": _sigmoid,
    "Sin": _ufunc(np.sin),
    "SliceUpdate": _slice_changed,
    "Softmax": _softmax,
    "Sort": _set(lambda state, inputs: np.sort(inputs[0], state[0])),
    "Sqrt": _root,
    "Square": _ufunc(np.square),
    "Subtract": _ufunc(np.subtract),
    "Tanh": _ufunc(np.tanh),
}
