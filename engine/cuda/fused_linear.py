"""Fuses linear layers that read the same input into one product: fewer, larger launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear


class Product(Protocol):
    """Computes several linear layers on one input, their outputs concatenated, without biases."""

    def __call__(self, x: mx.array) -> mx.array:
        """From ``[..., inputs]`` to ``[..., outputs of all layers]``."""
        ...

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        """The product of ``x``, plus ``to``: ``[..., outputs of all layers]``."""
        ...


class _Plain:
    def __init__(self, layers: Sequence[Any]) -> None:
        self._weight = _concatenated(layers, "weight").T

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self._weight

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        # MLX has a special kernel for a single token, which cannot add.
        alone = x.size == x.shape[-1]
        return to + x @ self._weight if alone else mx.addmm(to, x, self._weight)


class _Quantized:
    def __init__(self, layers: Sequence[Any]) -> None:
        first = layers[0]
        self._weight = _concatenated(layers, "weight")
        self._scales = _concatenated(layers, "scales")
        self._biases = _concatenated(layers, "biases") if first.get("biases") is not None else None
        self._quantization = _quantization(first)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x, self._weight, self._scales, self._biases, transpose=True, **self._quantization
        )

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        return to + self(x)


def fuse_linears(layers: Sequence[Any]) -> Product | None:
    """Fuses ``layers`` into one product; their weights become views of one array.

    Returns:
        None if they are not linear layers of the same class and type.
    """
    first = layers[0]
    same = {(type(layer), layer.weight.dtype, layer.weight.shape[1:]) for layer in layers}
    if len(same) > 1:
        return None
    if type(first) is Linear:
        return _Plain(layers)
    if type(first) is QuantizedLinear:
        alike = all(_quantization(layer) == _quantization(first) for layer in layers)
        return _Quantized(layers) if alike else None
    return None


def _quantization(layer: Any) -> dict[str, Any]:
    return {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}


def _concatenated(layers: Sequence[Any], name: str) -> mx.array:
    """Concatenates the layers' arrays ``name``, and replaces them by views of the result."""
    joined: mx.array = layers[0][name]
    if len(layers) > 1:
        joined = mx.concatenate([layer[name] for layer in layers])
        mx.eval(joined)
        start = 0
        for layer in layers:
            stop = start + layer[name].shape[0]
            layer[name] = joined[start:stop]
            mx.eval(layer[name])
            start = stop
    return joined
