"""Reads the operations of a decoder layer from MLX's graph of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from chairlift.engine.cpu.graph.graph import (
    Array,
    Call,
    Form,
    Graph,
    KeptRead,
    NoGraphError,
    Primitive,
    StateRead,
    StateWrite,
    Value,
)
from chairlift.engine.cpu.views import view
from chairlift.engine.model.attention import Attention, LatentAttention
from chairlift.engine.model.recorder import HostCall, record, recording

# Model files check for this type; see ``cache.state``.
if TYPE_CHECKING:
    _ArraysCache = object
else:
    from mlx_lm.models.cache import ArraysCache as _ArraysCache

# The name of the argument with a layer's cache.
CACHE = "cache"
_LOCK = threading.Lock()


class TracedCache:
    """The cache of an attention layer that is being recorded.

    Attributes:
        offset: the position of each token.
        fetched: the keys and the values that are read.

    Args:
        kept: see ``Form``.
        latent: the layer multiplies its rotary queries with the second array, as a part of
            attention. It gets an identity matrix in its place, so that the products are the
            queries themselves; see ``LatentAttention``.
    """

    def __init__(self, offset: mx.array, kept: Sequence[tuple[int, int]], latent: bool) -> None:
        self.offset, self._latent = offset, latent
        self.fetched: list[mx.array] = []
        self._kept = kept

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The arrays themselves: attention is recorded with what it adds to a cache."""
        self.fetched += [keys, values]
        if self._latent:
            values = mx.eye(values.shape[3])
            mx.eval(values)
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The arrays written to the cache; if another layer writes them, recorded reads."""
        for heads, dim in () if self.fetched else self._kept:
            read = record(KeptRead(), [], (self.offset.size, heads, 1, dim))
            assert read is not None
            self.fetched.append(read)
        keys, values = self.fetched[-2:]
        return keys, values


class TracedState(_ArraysCache):
    """The cache of a recurrent layer that is being recorded.

    Attributes:
        lengths, left_padding: there is no padding.
        written: the slots that were written.

    Args:
        tokens: one of each row.
        shapes: see ``Form.states``.
    """

    lengths = left_padding = None

    def __init__(self, tokens: int, shapes: Sequence[tuple[int, ...] | None]) -> None:
        # NOTE: does not call the parent's __init__.
        self._tokens, self._shapes = tokens, shapes
        self._slots: dict[int, mx.array] = {}
        self.written: set[int] = set()

    def __getitem__(self, slot: int) -> mx.array | None:
        shape = self._shapes[slot]
        if slot not in self._slots and shape is not None:
            read = record(StateRead(slot), [], (self._tokens, *shape))
            assert read is not None
            self._slots[slot] = read
        return self._slots.get(slot)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self._slots[slot] = value
        self.written.add(slot)
        record(StateWrite(slot), [value], ())

    def advance(self, n: int) -> None:
        """Does nothing: a state has no position."""


def trace(layer: Any, tokens: int, form: Form) -> Graph:
    """The graph of a decoder layer.

    Raises:
        NoGraphError: the layer uses its cache in another way than by attention.
        Exception: whatever the layer raises for such a cache.
    """
    others = [mx.zeros((tokens, *shape), dtype) for shape, dtype in form.others.values()]
    x, offset = mx.zeros(form.shape(tokens)), mx.zeros((tokens,), mx.int32)
    caches = _Caches(offset, form)
    with recording() as expected:
        result = _called(layer, form, x, caches, others)
    if caches.state is not None and len(caches.state.written) != len(form.states):
        raise NoGraphError("a layer does not write all of its states")
    if any(not isinstance(each, mx.array | None) for each in _leaves(result)):
        raise NoGraphError("a layer returns something else than arrays")
    calls: list[HostCall] = []
    latent = any(isinstance(call.operation, LatentAttention) for call in expected)

    def run(x: mx.array, offset: mx.array, *more: mx.array) -> list[mx.array]:
        others, stand_ins = more[: len(form.others)], more[len(form.others) :]
        with recording(stand_ins) as recorded:
            caches = _Caches(offset, form, latent)
            results = _leaves(_called(layer, form, x, caches, others))
        calls[:] = recorded
        inputs = (each for call in recorded for each in call.inputs)
        own = (each for each in results if each is not None)
        return [*own, *inputs, *caches.attention.fetched]

    events: list[dict[str, Any]] = []
    stand_ins = [mx.zeros(call.shape) for call in expected]
    with _without_copies():
        mx.export_function(events.append, run, x, offset, *others, *stand_ins)
    return _graph(events, calls, [*form.others], result)


def _leaves(result: Any) -> Sequence[Any]:
    """The results of a layer that returns one, or a tuple of them."""
    return result if isinstance(result, tuple) else (result,)


@contextmanager
def _without_copies() -> Iterator[None]:
    """Context in which this thread's ``mx.contiguous`` does nothing: MLX cannot export it."""
    own = threading.get_ident()
    with _LOCK:
        original = mx.contiguous

        def contiguous(a: mx.array, *args: Any, **named: Any) -> mx.array:
            return a if threading.get_ident() == own else original(a, *args, **named)

        mx.contiguous = contiguous
        try:
            yield
        finally:
            mx.contiguous = original


class _Caches:
    """The caches of a layer that is being recorded.

    Attributes:
        attention: has keys and values.
        state: has states; None: there is none.
        given: what the layer gets.

    Args:
        latent: see ``TracedCache``.
    """

    def __init__(self, offset: mx.array, form: Form, latent: bool = False) -> None:
        self.attention = TracedCache(offset, form.kept, latent)
        self.state = TracedState(offset.size, form.states) if form.states else None
        self.given: Any = self.attention if self.state is None else self.state
        if form.listed:
            self.given = CacheList(*(self.state if own else self.attention for own in form.listed))


def _called(
    layer: Any, form: Form, x: mx.array, caches: _Caches, others: Sequence[mx.array]
) -> Any:
    given: dict[str, Any] = dict(zip(form.others, others, strict=True))
    given |= {CACHE: caches.given, **dict.fromkeys(form.positions, caches.attention.offset)}
    return layer(x, **{name: given.get(name) for name in form.names[1:]})


def _graph(
    events: Sequence[dict[str, Any]], calls: Sequence[HostCall], names: Sequence[str], result: Any
) -> Graph:
    of = {event["type"]: event for event in events}
    x, offset, *more = (Value(*each) for each in of["inputs"]["inputs"])
    others, stand_ins = dict(zip(names, more, strict=False)), more[len(names) :]
    inputs = iter([Value(*each) for each in of["outputs"]["outputs"]])
    results = [None if each is None else next(inputs) for each in _leaves(result)]
    own = [
        Call(call.operation, [next(inputs) for _ in call.inputs], stand_in)
        for call, stand_in in zip(calls, stand_ins, strict=True)
    ]
    own = _with_fetched(own, [*inputs])
    producers: dict[str, Primitive] = {}
    for event in events:
        if event["type"] == "primitive":
            arrays = [[Value(*each) for each in event[side]] for side in ("inputs", "outputs")]
            primitive = Primitive(event["name"], event["arguments"], *arrays)
            producers |= {each.name: primitive for each in primitive.outputs}
    constants: dict[str, Array] = {
        name: np.array(view(_readable(array))) for name, array in of["constants"]["constants"]
    }
    is_tuple = isinstance(result, tuple)
    return Graph(x, offset, others, results, is_tuple, own, producers, constants)


def _with_fetched(calls: Sequence[Call], fetched: Sequence[Value]) -> list[Call]:
    """Adds the rotary keys to the inputs of latent attention.

    Args:
        fetched: what is read of the cache, in the order of the calls.

    Raises:
        NoGraphError: attention reads something else, or anything else reads it.
    """
    result, updates = [], zip(fetched[::2], fetched[1::2], strict=True)
    for call in calls:
        if isinstance(call.operation, Attention | LatentAttention):
            keys, values = next(updates, (None, None))
            latent = isinstance(call.operation, LatentAttention)
            if values is None or call.inputs[1] != keys or not (latent or call.inputs[2] == values):
                raise NoGraphError("a layer computes a part of attention itself")
            call = call._replace(inputs=[*call.inputs, values]) if latent else call
        result.append(call)
    if next(updates, None) is not None:
        raise NoGraphError("a layer computes a part of attention itself")
    return result


def _readable(array: mx.array) -> mx.array:
    """The same numbers in a type that NumPy has."""
    return array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
