"""The graph of a decoder layer: operations of MLX and of the host, and the arrays between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
from numpy.typing import NDArray

from chairlift.engine.model.attention import Attention, LatentAttention

Array = NDArray[Any]


class NoGraphError(Exception):
    """A layer does something that its graph does not show."""


class Value(NamedTuple):
    """An array of a graph.

    Attributes:
        name: unique within the graph.
    """

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype


class Primitive(NamedTuple):
    """An operation of MLX.

    Attributes:
        kind: the name of MLX's class.
        state: its settings; for each kind others.
    """

    kind: str
    state: Sequence[Any]
    inputs: Sequence[Value]
    outputs: Sequence[Value]


class Call(NamedTuple):
    """An operation of the host; see ``HostCall``."""

    operation: Any
    inputs: Sequence[Value]
    output: Value


class Form(NamedTuple):
    """The form of a layer's calls.

    Attributes:
        names: of the arguments; the first is ``x``.
        width: the numbers of a token.
        leading: the axes of ``x`` before the tokens.
        states: the shape of a row's state in each slot of the cache; None: it has none.
        kept: the heads and the dimension of the keys and of the values in the cache; empty: it has
            none.
        listed: which caches of a list have states; empty: there is one cache, in no list.
        positions: the arguments that are the tokens' positions.
        others: the shape behind ``tokens`` and the type of each further argument that is an array
            ``[tokens, ...]``, by name. Arguments that are neither these nor a mask or the cache are
            None.
    """

    names: Sequence[str]
    width: int
    leading: tuple[int, ...] = ()
    states: Sequence[tuple[int, ...] | None] = ()
    kept: Sequence[tuple[int, int]] = ()
    listed: Sequence[bool] = ()
    positions: Sequence[str] = ()
    others: Mapping[str, tuple[tuple[int, ...], mx.Dtype]] = MappingProxyType({})

    def shape(self, tokens: int) -> tuple[int, ...]:
        """The shape of ``x``."""
        return *self.leading, tokens, 1, self.width


class Graph(NamedTuple):
    """The operations of a layer for a number of tokens.

    Attributes:
        x, offset: the layer's input, see ``Form.shape``, and the positions ``[tokens]``.
        others: further arguments by name; see ``Form``.
        results: its outputs; None stands for itself.
        returns_tuple: whether it returns them as a tuple; else there is one.
        calls: in the order in which the layer makes them.
        producers: the primitive that computes a value, by its name.
        constants: by name.
    """

    x: Value
    offset: Value
    others: Mapping[str, Value]
    results: Sequence[Value | None]
    returns_tuple: bool
    calls: Sequence[Call]
    producers: dict[str, Primitive]
    constants: dict[str, Array]

    @property
    def uses_offset(self) -> bool:
        """Whether any operation reads the positions."""
        return any(self.offset in each for each in self.inputs)

    @property
    def uses_cache(self) -> bool:
        """Whether any operation reads or writes the layer's cache."""
        kinds = Attention | LatentAttention | KeptRead | StateRead | StateWrite
        return self.uses_offset or any(isinstance(call.operation, kinds) for call in self.calls)

    @property
    def inputs(self) -> list[Sequence[Value]]:
        """The inputs of each operation."""
        calls = [call.inputs for call in self.calls]
        return calls + [primitive.inputs for primitive in self.producers.values()]


class KeptRead(NamedTuple):
    """A ``HostCall``: the keys or values that another layer has written to the cache in this step.

    Only attention reads them; it gets no new ones then.
    """


class StateRead(NamedTuple):
    """A ``HostCall``: the rows' state in a slot of a recurrent layer's cache."""

    slot: int


class StateWrite(NamedTuple):
    """A ``HostCall``: writes the rows' state to a slot; its result means nothing."""

    slot: int
