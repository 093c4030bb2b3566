"""Adds the steps of the calls that a layer makes outside of MLX: products, MLPs, attention, ..."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from chairlift.cache.state import StateLayer, host_state
from chairlift.engine.cpu import elementwise
from chairlift.engine.cpu.activations import Gated
from chairlift.engine.cpu.compiled.recurrence import add_decay
from chairlift.engine.cpu.compiled.recurrent_layers import Recurrence
from chairlift.engine.cpu.experts import Experts, routes_of
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.graph.attention import lower_attention, lower_latent_attention
from chairlift.engine.cpu.graph.graph import (
    Array,
    Call,
    KeptRead,
    NoGraphError,
    StateRead,
    StateWrite,
)
from chairlift.engine.cpu.graph.head_products import lower_head_product
from chairlift.engine.cpu.graph.lowering import LayerCall, Lowering, or_none
from chairlift.engine.cpu.host_linear import Product
from chairlift.engine.cpu.host_mlp import GatedMlp
from chairlift.engine.cpu.kernels import Rotation
from chairlift.engine.cpu.matrix import apart
from chairlift.engine.cpu.views import view
from chairlift.engine.model.attention import Attention, LatentAttention
from chairlift.engine.model.layers.head_products import HeadProduct


def lower_call(lowering: Lowering, call: Call) -> Array:
    """Adds the steps of a call, and returns its result.

    Raises:
        NoGraphError: its inputs have another form than few tokens have.
    """
    operation, shape = call.operation, call.output.shape
    if isinstance(operation, Recurrence):
        return _recurrence(lowering, call)
    if isinstance(operation, StateWrite) and operation.slot in lowering.in_place:
        return np.zeros(())
    inputs = [lowering.array(each) for each in call.inputs]
    if isinstance(operation, Product):
        return _product(lowering, operation, call).reshape(shape)
    if isinstance(operation, GatedMlp):
        return _mlp(lowering, operation, inputs[0]).reshape(shape)
    if isinstance(operation, Gated):
        return _gated(lowering, operation, *inputs).reshape(shape)
    if isinstance(operation, Rotation):
        return _rotated(lowering, operation, call, inputs[0])
    if isinstance(operation, Experts):
        return _experts(lowering, operation, call, *inputs).reshape(shape)
    if isinstance(operation, Attention):
        return lower_attention(lowering, operation, inputs, shape)
    if isinstance(operation, LatentAttention):
        return lower_latent_attention(lowering, operation, inputs, shape)
    if isinstance(operation, HeadProduct):
        return lower_head_product(lowering, operation, inputs[0])
    if isinstance(operation, KeptRead):
        return np.empty((0, *shape[1:]), np.float32)
    if isinstance(operation, StateRead):
        return lowering.state(operation.slot, shape)
    if isinstance(operation, StateWrite):
        return _written(lowering, operation, inputs[0])
    raise NoGraphError(f"no steps for {operation}")


def _product(lowering: Lowering, operation: Product, call: Call) -> Array:
    products, key = operation.products, (id(operation.products), call.inputs[0].name)
    if key not in lowering.once:
        x = lowering.flat(lowering.array(call.inputs[0]))
        name = lowering.name()
        product = or_none(lambda: products.build(lowering.program, name, x))
        if product is None:
            product = lowering.new((len(x), products.matrix.stops[-1]))
            into = product
            lowering.then(lambda _: np.copyto(into, products.matrix(x)))
        lowering.once[key] = apart(product, products.matrix.stops)
    result: Array = lowering.once[key][operation.member]
    return result


def _mlp(lowering: Lowering, operation: GatedMlp, x: Array) -> Array:
    mlp, tokens = operation.mlp, lowering.flat(x)
    jobs = len(lowering.program.program)
    result = or_none(lambda: mlp.build(lowering.program, tokens, lowering.name()))
    if result is None:
        if len(lowering.program.program) != jobs:
            raise NoGraphError("a part of an MLP has no compiled functions")
        into = result = lowering.new((len(tokens), mlp.products[1].matrix.stops[-1]))
        lowering.then(lambda _: np.copyto(into, mlp(tokens)))
    return result


def _gated(lowering: Lowering, operation: Gated, gates: Array, others: Array) -> Array:
    flat = [lowering.flat(each) for each in (gates, others)]
    name, activation = lowering.name(), operation.activation
    result = or_none(lambda: lowering.program.gated(activation, name, *flat))
    if result is None:
        into = result = lowering.new(flat[0].shape)
        function = getattr(elementwise, activation)
        lowering.then(lambda _: np.copyto(into, function(*flat)))
    return result


def _rotated(lowering: Lowering, operation: Rotation, call: Call, x: Array) -> Array:
    rope, (tokens, heads, length, dim) = operation.rope, x.shape
    if length != 1:
        raise NoGraphError("several tokens of a row")
    if not lowering.is_offset(call.inputs[1]):
        raise NoGraphError("positions that the layer does not get")
    key = "angles", rope.settings
    if key not in lowering.once:
        shape = tokens, rope.dims // 2
        cosines, sines = (lowering.new(shape) for _ in range(2))

        def angles(call: LayerCall) -> None:
            cosines[...], sines[...] = rope.host_table(call.offset)

        lowering.once[key] = cosines, sines
        lowering.before(angles)
    cosines, sines = lowering.once[key]
    x = x[:, :, 0]
    name, rotates_all = lowering.name(), rope.dims == dim
    if rotates_all:
        whole = or_none(lambda: lowering.program.rotated(name, x, cosines, sines))
        if whole is not None:
            return whole[:, :, None]
    result = lowering.new((tokens, heads, dim))

    def rotate(call: LayerCall) -> None:
        result[..., : rope.dims] = elementwise.rotated(x[..., : rope.dims], cosines, sines)
        result[..., rope.dims :] = x[..., rope.dims :]

    lowering.then(rotate)
    return result[:, :, None]


def _experts(lowering: Lowering, operation: Experts, call: Call, x: Array, chosen: Array) -> Array:
    """Multiplies pairs of a token and an expert in the order of the experts."""
    layer, key = operation.layer, ("routes", call.inputs[1].name)
    pairs = chosen.size
    if key not in lowering.once:
        lowering.once[key] = _Pairs(chosen, layer.count)
        lowering.then(lowering.once[key].find)
    own: _Pairs = lowering.once[key]
    tokens = lowering.flat(x)
    if len(tokens) not in (pairs, pairs // chosen.shape[-1]):
        raise NoGraphError(f"experts of {x.shape} and {chosen.shape}")
    gathered, share = lowering.new((pairs, tokens.shape[1])), pairs // len(tokens)
    lowering.then(lambda _: np.take(tokens, own.order // share, axis=0, out=gathered))
    name = lowering.name()
    program = lowering.program
    product, jobs = layer.build(program, name, gathered, own.groups)
    lowering.then_run(lambda _: [job.set(own.count) for job in jobs])
    result = lowering.new((pairs, call.output.shape[-1]))
    bias = view(layer.bias) if "bias" in layer else None

    def restore(_: LayerCall) -> None:
        result[own.order] = product
        if bias is not None:
            result[...] += bias[chosen.reshape(-1)]

    lowering.then(restore)
    return result


class _Pairs:
    """The order of pairs by expert.

    Attributes:
        order, groups: see ``Routes``; ``count`` of the groups are used.

    Args:
        chosen: the experts of all pairs.
        experts: the number of experts.
    """

    def __init__(self, chosen: Array, experts: int) -> None:
        self._chosen, self._experts = chosen, experts
        self.order = np.empty(chosen.size, np.intp)
        self.groups = np.zeros((chosen.size, 3), np.int64)
        self.count = 0

    def find(self, _: LayerCall) -> None:
        """Finds them for the chosen experts.

        Raises:
            ValueError: there is no such expert.
        """
        routes = routes_of(self._chosen.reshape(-1))
        first, last = routes.groups[[0, -1], 0]
        if first < 0 or last >= self._experts:
            raise ValueError(f"experts {first} to {last} of {self._experts}")
        self.order[:] = routes.order
        self.count = len(routes.groups)
        self.groups[: self.count] = routes.groups


def _recurrence(lowering: Lowering, call: Call) -> Array:
    """Changes a state in the memory of the cache, which may be another in each call."""
    state, *others = call.inputs
    slot = lowering.own_slot(state)
    k, q, v, g, *beta = (lowering.contiguous(lowering.array(each)) for each in others)
    result = lowering.new(v.shape)
    program, shape = lowering.program.program, state.shape
    arrays = k, q, v, g, beta[0] if beta else None, result
    number = add_decay(shape, 0, *arrays, program.add)
    assert isinstance(number, int)
    lowering.in_place[slot] = shape

    def place(call: LayerCall) -> None:
        assert call.state is not None
        memory = _memory(call.state, slot)
        add_decay(shape, memory.ctypes.data, *arrays, partial(program.change, number))

    lowering.then_run(place)
    return result


def _memory(state: StateLayer, slot: int) -> Floats:
    """The contiguous memory of a slot, to which nothing else refers."""
    array = state[slot]
    assert array is not None
    memory = host_state(array)
    if memory is None or not memory.flags.c_contiguous:
        state[slot] = mx.array(np.ascontiguousarray(view(array)))
        array = state[slot]
        assert array is not None
        memory = host_state(array)
        assert memory is not None
    return memory


def _written(lowering: Lowering, operation: StateWrite, value: Array) -> Array:
    slot, state = operation.slot, lowering.contiguous(value)

    def write(call: LayerCall) -> None:
        assert call.state is not None
        call.state[slot] = mx.array(state)

    lowering.then(write)
    return np.zeros(())
