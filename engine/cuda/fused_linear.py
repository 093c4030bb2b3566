"""Fuses linear layers that read the same input into one product: fewer, larger launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear


class Product(Protocol):
    """The products of an input with the weights of some layers, side by side, without biases."""

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., inputs]`` to ``[..., outputs of all]``."""
        ...

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        """The same, added to ``to``, ``[..., outputs of all]``."""
        ...


class _Whole:
    def __init__(self, layers: Sequence[Any]) -> None:
        self._weight = _concatenated(layers, "weight").T

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self._weight

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        # A single token has a kernel of its own in MLX, which cannot add.
        alone = x.size == x.shape[-1]
        return to + x @ self._weight if alone else mx.addmm(to, x, self._weight)


class _Quantized:
    def __init__(self, layers: Sequence[Any]) -> None:
        first = layers[0]
        self._weight = _concatenated(layers, "weight")
        self._scales = _concatenated(layers, "scales")
        self._biases = _concatenated(layers, "biases") if first.get("biases") is not None else None
        self._how = _how(first)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x, self._weight, self._scales, self._biases, transpose=True, **self._how
        )

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        return to + self(x)


def fuse_linears(layers: Sequence[Any]) -> Product | None:
    """Makes one product of ``layers``, whose weights become views of one array.

    Returns:
        None if they are not linear layers of the same kind and type.
    """
    first = layers[0]
    same = {(type(layer), layer.weight.dtype, layer.weight.shape[1:]) for layer in layers}
    if len(same) > 1:
        return None
    if type(first) is Linear:
        return _Whole(layers)
    if type(first) is QuantizedLinear and all(_how(layer) == _how(first) for layer in layers):
        return _Quantized(layers)
    return None


def _how(layer: Any) -> dict[str, Any]:
    return {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}


def _concatenated(layers: Sequence[Any], name: str) -> mx.array:
    """Concatenates the layers' arrays of that name, and makes theirs views of the result."""
    whole: mx.array = layers[0][name]
    if len(layers) > 1:
        whole = mx.concatenate([layer[name] for layer in layers])
        mx.eval(whole)
        start = 0
        for layer in layers:
            stop = start + layer[name].shape[0]
            layer[name] = whole[start:stop]
            mx.eval(layer[name])
            start = stop
    return whole
