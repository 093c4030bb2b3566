"""Each of MLX's operations, as a step of a layer's graph, compared with MLX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.positional_encoding import RoPE

from chairlift.engine.cpu.graph.graph import Form, NoGraphError
from chairlift.engine.cpu.graph.host_operations import lower_call
from chairlift.engine.cpu.graph.lowering import LayerCall, Lowering
from chairlift.engine.cpu.graph.trace import trace
from chairlift.engine.cpu.kernels import SharedRope

WIDTH = 48
FORM = Form(["x", "mask", "cache"], WIDTH)
Function = Callable[[mx.array], mx.array]

WEIGHT = mx.random.normal((WIDTH, WIDTH), key=mx.random.key(7))
VECTOR = mx.random.normal((WIDTH,), key=mx.random.key(8))
mx.eval(WEIGHT, VECTOR)


def _picked(x: mx.array, places: mx.array) -> mx.array:
    return mx.take_along_axis(x, places, axis=-1)


def _with_a_slice(x: mx.array) -> mx.array:
    result = x * 2
    result[..., 8:] = result[..., 8:] + x[..., :1]
    return result


def _norm(x: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.mean(x.square(), axis=-1, keepdims=True) + 1e-5)


OPERATIONS: dict[str, Function] = {
    "abs": mx.abs,
    "add a vector": lambda x: x + VECTOR,
    "add a number": lambda x: 3 - x,
    "matmul with a bias": lambda x: mx.addmm(VECTOR, x, WEIGHT),
    "matmul": lambda x: x @ WEIGHT.T,
    "arange": lambda x: x * mx.arange(WIDTH).astype(mx.float32),
    "the largest eight": lambda x: (
        x + _picked(x, mx.argpartition(-x, 8, axis=-1)[..., :8]).sum(axis=-1, keepdims=True)
    ),
    "argmax": lambda x: x + mx.argmax(x, axis=-1, keepdims=True).astype(mx.float32),
    "argsort": lambda x: _picked(x, mx.argsort(x, axis=-1)),
    "sort": lambda x: mx.sort(x, axis=-1),
    "concatenate": lambda x: mx.concatenate([x[..., 8:], -x[..., :8]], axis=-1),
    "sines": lambda x: mx.sin(x) * mx.cos(x),
    "compare": lambda x: mx.where((x > 0) & (x <= 1) | ~(x >= -1) | (x == 2), x, x * 2),
    "less": lambda x: mx.where((x < 0.5) | (x != x), x, x - 1),
    "erf": mx.erf,
    "exp": mx.exp,
    "expm1": mx.expm1,
    "floor and round": lambda x: mx.floor(x) + mx.round(x * 7),
    "logarithms": lambda x: mx.log(x.square() + 1) + mx.log2(x.abs() + 1) + mx.log10(x.abs() + 1),
    "log1p": lambda x: mx.log1p(x.abs()),
    "logaddexp": lambda x: mx.logaddexp(x, VECTOR),
    "maximum and minimum": lambda x: mx.minimum(mx.maximum(x, -0.5), VECTOR),
    "partition": lambda x: x - mx.partition(x, 5, axis=-1)[..., 5:6],
    "power": lambda x: mx.abs(x) ** 1.5 + mx.power(x.abs(), VECTOR) + mx.power(2.0, x),
    "square and cube": lambda x: x**2 + x**3,
    "gelu": gelu_approx,
    "put": lambda x: mx.put_along_axis(x, mx.array([[[3, 5]]] * len(x)), mx.array(0.25), axis=-1),
    "sum": lambda x: x / x.abs().sum(axis=-1, keepdims=True),
    "sums of other axes": lambda x: _tiled(x.reshape(*x.shape[:2], 4, 12).sum(axis=2)),
    "many numbers of another axis": lambda x: _tiled(x.reshape(*x.shape[:2], 24, 2).sum(axis=2)),
    "the largest and least": lambda x: x - x.max(axis=-1, keepdims=True) * x.min(keepdims=True),
    "product": lambda x: x + mx.prod(x[..., :3], axis=-1, keepdims=True),
    "sigmoid": mx.sigmoid,
    "one of an axis": lambda x: x[-1] + x[:, 0] * 2,
    "lines at places": lambda x: x + WEIGHT[mx.argmax(x, axis=-1).astype(mx.int32) - 3],
    "numbers at places": lambda x: VECTOR[mx.argsort(x, axis=-1)],
    "a slice that changes": lambda x: x.at[..., 3:9].add(1).at[..., ::7].maximum(VECTOR[0]),
    "a slice that is replaced": _with_a_slice,
    "softmax": lambda x: mx.softmax(x, axis=-1, precise=True),
    "split": lambda x: mx.concatenate(mx.split(x, [7, 20], axis=-1)[::-1], axis=-1),
    "square root": lambda x: mx.sqrt(x.abs()) + mx.rsqrt(x.square() + 1),
    "tanh": mx.tanh,
    "pad": lambda x: mx.pad(x[..., 3:-2], [(0, 0), (0, 0), (2, 3)]),
    "integers": lambda x: x + mx.array([4, 9], mx.int32).sum().astype(mx.float32),
    "norm": _norm,
    "norm with weights": lambda x: mx.fast.rms_norm(x, VECTOR, 1e-6),
    "norm with weights plus one": lambda x: mx.fast.rms_norm(x, 1 + VECTOR, 1e-6),
    "norms of heads": lambda x: mx.fast.rms_norm(
        x.reshape(*x.shape[:2], 3, 16), VECTOR[:16], 1e-6
    ).reshape(x.shape),
    "norm with a number for each token": lambda x: (
        x * mx.rsqrt(mx.mean(x.square(), axis=-1, keepdims=True) + x[..., :1].square())
    ),
    "nearly a norm": lambda x: x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) / 7 + 1e-5),
    "layer norm": lambda x: mx.fast.layer_norm(x, VECTOR, VECTOR, 1e-5),
    "heads": lambda x: (
        x.reshape(*x.shape[:2], 3, 16).swapaxes(1, 2).swapaxes(1, 2).reshape(x.shape) * 2
    ),
    "transposed heads": lambda x: (x.reshape(*x.shape[:2], 3, 16).swapaxes(2, 3) + 1).reshape(
        x.shape
    ),
    "only constants": lambda x: mx.broadcast_to(VECTOR * 2 + mx.arange(WIDTH), x.shape) + 0 * x,
    "itself": lambda x: x,
}


def _tiled(x: mx.array) -> mx.array:
    """Repeats the last axis until it has ``WIDTH`` numbers."""
    return mx.concatenate([x] * (WIDTH // x.shape[-1]), axis=-1)


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("name", OPERATIONS)
def test_steps_compute_what_mlx_does(name: str, tokens: int) -> None:
    function = OPERATIONS[name]

    def layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
        return function(x)

    lowered = Lowering(trace(layer, tokens, FORM), lower_call).lowered()
    for seed in range(2):  # the second run finds the memory of the first
        x = mx.random.normal((tokens, 1, WIDTH), key=mx.random.key(seed))
        lowered.x[...] = np.array(x)
        for step in lowered.steps:
            step(LayerCall(None, None, None))
        np.testing.assert_allclose(
            lowered.results[0], np.array(function(x)), rtol=2e-5, atol=2e-6, err_msg=name
        )


def test_positions_are_an_input() -> None:
    def layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
        return x * mx.cos(cache.offset.astype(mx.float32))[:, None, None]

    lowered = Lowering(trace(layer, 2, FORM), lower_call).lowered()
    assert lowered.offset is not None
    lowered.x[...], lowered.offset[...] = 1, [0, 5]
    for step in lowered.steps:
        step(LayerCall(None, None, None))
    [result] = lowered.results
    assert result is not None
    np.testing.assert_allclose(result[:, 0, 0], np.cos([0, 5]), rtol=1e-6)


def test_rotation_by_other_positions_has_no_steps() -> None:
    rope = SharedRope(RoPE(WIDTH), {})

    def layer(x: mx.array, mask: Any, cache: Any, shift: int) -> mx.array:
        return rope(x[:, None], offset=cache.offset + shift)[:, 0]

    with pytest.raises(NoGraphError):
        Lowering(trace(partial(layer, shift=1), 2, FORM), lower_call).lowered()


def test_several_results() -> None:
    def layer(x: mx.array, mask: Any, cache: Any) -> Any:
        return x[..., :8] * 2, None, x.sum(axis=-1)

    lowered = Lowering(trace(layer, 3, FORM), lower_call).lowered()
    x = mx.random.normal((3, 1, WIDTH), key=mx.random.key(0))
    lowered.x[...] = np.array(x)
    for step in lowered.steps:
        step(LayerCall(None, None, None))
    one, none, other = lowered.results
    assert lowered.returns_tuple
    assert none is None
    for ours, theirs in ((one, x[..., :8] * 2), (other, x.sum(axis=-1))):
        assert ours is not None
        np.testing.assert_allclose(ours, np.array(theirs), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: mx.cumsum(x, axis=-1),  # no operation
        lambda x: x.astype(mx.bfloat16).astype(mx.float32),  # no type
        lambda x: mx.ones((4, 4))[x.astype(mx.int32), x.astype(mx.int32)],  # places of two axes
        lambda x: [x],
        lambda x: x * float(x.sum().item()),  # evaluates
    ],
)
def test_other_layers_have_no_steps(function: Any) -> None:
    def layer(x: mx.array, mask: Any, cache: Any) -> Any:
        return function(x)

    with pytest.raises((NoGraphError, ValueError, AttributeError)):
        Lowering(trace(layer, 2, FORM), lower_call).lowered()


def test_tracing_leaves_mlx_as_it_was() -> None:
    before = mx.contiguous

    def layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
        return mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)

    graph = trace(layer, 2, FORM)
    assert mx.contiguous is before
    [result] = graph.results
    assert result is not None
    assert result.shape == (2, 1, WIDTH)
