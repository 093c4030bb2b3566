"""Fuses linear layers that read the same input into one product: fewer, larger launches.

The layers may be one rank's part of divided ones. A layer that has a part of the inputs computes a
part of each output, and the ranks' parts are summed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear

from chairlift.engine.cuda.heads import swiglu
from chairlift.engine.cuda.quantized import QuantizedWeight
from chairlift.engine.cuda.skinny import MAX_TOKENS, Norm, is_fit, kernel_works, skinny_product

_PLAIN_LAYERS = (Linear, AllToShardedLinear, ShardedToAllLinear)
_QUANTIZED_LAYERS = (QuantizedLinear, QuantizedAllToShardedLinear, QuantizedShardedToAllLinear)
_SUMMED_LAYERS = (ShardedToAllLinear, QuantizedShardedToAllLinear)


class Product(ABC):
    """Computes several linear layers on one input, their outputs concatenated, without biases.

    Attributes:
        layers: the linear layers.
        group: the ranks whose outputs are summed; None: this rank's outputs are whole.
        quantized: the layers' common weight, if they are quantized.
        addition: adds to the outputs ``y`` what something else computes from the input ``x``, from
            ``y`` and ``x``; see ``engine.lora``. None: nothing.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = tuple(layers)
        self.group = layers[0].group if isinstance(layers[0], _SUMMED_LAYERS) else None
        self.quantized: QuantizedWeight | None = None
        self.addition: Callable[[mx.array, mx.array], mx.array] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """From ``[..., inputs]`` to ``[..., outputs of all layers]``."""
        return self._with_addition(self._over_ranks(self._product(x)), x)

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        """The product of ``x``, plus ``to``: ``[..., outputs of all layers]``."""
        adds = self.group is None or self.group.rank() == 0  # one rank adds for all
        y = self._sum(x, to) if adds else self._product(x)
        return self._with_addition(self._over_ranks(y), x)

    def normed(self, x: mx.array, norm: RMSNorm) -> mx.array:
        """The product of ``norm(x)``."""
        return self(norm(x))

    def gated(self, x: mx.array, norm: RMSNorm) -> mx.array:
        """The SwiGLU of the product of ``norm(x)``, whose first half is the gate."""
        return swiglu(self.normed(x, norm))

    def _with_addition(self, y: mx.array, x: mx.array) -> mx.array:
        return y if self.addition is None else self.addition(y, x)

    def _over_ranks(self, y: mx.array) -> mx.array:
        return y if self.group is None else mx.distributed.all_sum(y, group=self.group)

    @abstractmethod
    def _product(self, x: mx.array) -> mx.array: ...

    @abstractmethod
    def _sum(self, x: mx.array, to: mx.array) -> mx.array: ...


class _Plain(Product):
    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        weight = _concatenated(layers, "weight")
        self._rows, self._weight = weight, weight.T
        self._has_kernel = is_fit(weight) and kernel_works(weight.dtype)

    def _product(self, x: mx.array) -> mx.array:
        # MLX has a special kernel for a single token, which cannot do anything else.
        if self._are_few(x) and not _is_one(x):
            return self._skinny(x)
        return x @ self._weight

    def _sum(self, x: mx.array, to: mx.array) -> mx.array:
        if self._are_few(x):
            return self._skinny(x, to=to.reshape(-1, to.shape[-1]))
        return to + x @ self._weight if _is_one(x) else mx.addmm(to, x, self._weight)

    def normed(self, x: mx.array, norm: RMSNorm) -> mx.array:
        if self._takes(x, norm):
            return self._skinny(x, Norm(norm.weight, norm.eps))
        return super().normed(x, norm)

    def gated(self, x: mx.array, norm: RMSNorm) -> mx.array:
        if self._takes(x, norm):
            return self._skinny(x, Norm(norm.weight, norm.eps), gated=True)
        return super().gated(x, norm)

    def _are_few(self, x: mx.array) -> bool:
        few = 0 < x.size <= MAX_TOKENS * x.shape[-1]
        return few and self._has_kernel and x.dtype == self._rows.dtype

    def _takes(self, x: mx.array, norm: RMSNorm) -> bool:
        """Whether the kernel can compute the norm, too."""
        alike = norm.weight.dtype == x.dtype == mx.bfloat16 and self.group is None
        return alike and self.addition is None and self._are_few(x)

    def _skinny(self, x: mx.array, *more: Any, **options: Any) -> mx.array:
        flat = skinny_product(x.reshape(-1, x.shape[-1]), self._rows, *more, **options)
        return flat.reshape(*x.shape[:-1], -1)


class _Quantized(Product):
    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        first = layers[0]
        biases = _concatenated(layers, "biases") if first.get("biases") is not None else None
        self.quantized = self._whole = QuantizedWeight(
            first, _concatenated(layers, "weight"), _concatenated(layers, "scales"), biases
        )

    def _product(self, x: mx.array) -> mx.array:
        return self._whole(x)

    def _sum(self, x: mx.array, to: mx.array) -> mx.array:
        return self._whole.added(x, to)


def fuse_linears(layers: Sequence[Any]) -> Product | None:
    """Fuses ``layers`` into one product; their weights become views of one array.

    Returns:
        None if they are not linear layers, or one rank's parts of them, of the same class and type.
    """
    first = layers[0]
    same = {(type(layer), layer.weight.dtype, layer.weight.shape[1:]) for layer in layers}
    if len(same) > 1:
        return None
    if type(first) in _PLAIN_LAYERS:
        return _Plain(layers)
    if type(first) in _QUANTIZED_LAYERS:
        alike = all(_quantization(layer) == _quantization(first) for layer in layers)
        return _Quantized(layers) if alike else None
    return None


def _is_one(x: mx.array) -> bool:
    """Whether ``x`` is a single token."""
    return x.size == x.shape[-1]


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
