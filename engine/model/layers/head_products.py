"""Products with a matrix for each head, for steps that pack the tokens of all sequences.

Multi-head latent attention multiplies each head's queries and results with a matrix of their own.
In a packed step ``[tokens, 1]`` MLX would compute ``tokens * heads`` products with one vector each,
which read a matrix every time. With the heads first there is one product for each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from chairlift.engine.model.recorder import record


class HeadProduct(NamedTuple):
    """A ``HostCall``: ``[rows, heads, 1, inputs]`` by the matrices of a layer, transposed."""

    layer: Any


def install(model: Any) -> None:
    """Replaces the products of a model's layers."""
    classes = {MultiLinear: HeadProducts, QuantizedMultiLinear: QuantizedHeadProducts}
    for layer in model.modules():
        if (replacing := classes.get(type(layer))) is not None:
            layer.__class__ = replacing


class _HeadsFirst:
    """Changes the order of a packed step's arrays before and after the product."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """``[rows, heads, length, inputs]`` → ``[rows, heads, length, outputs]``."""
        if transpose and x.ndim == 4 and x.shape[2] == 1:
            shape = *x.shape[:3], self.weight.shape[1]  # type: ignore[attr-defined]
            if (stand_in := record(HeadProduct(self), [x], shape)) is not None:
                return stand_in
        packed = x.ndim == 4 and x.shape[0] > 1 and x.shape[2] == 1
        result = self.multiply(x.swapaxes(0, 2) if packed else x, transpose)
        return result.swapaxes(0, 2) if packed else result

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """As ``__call__``, in the order of ``x``'s axes."""
        call: Any = super().__call__  # type: ignore[misc]
        result: mx.array = call(x, transpose)
        return result


class HeadProducts(_HeadsFirst, MultiLinear):  # type: ignore[misc]
    """mlx-lm's ``MultiLinear``."""


class QuantizedHeadProducts(_HeadsFirst, QuantizedMultiLinear):  # type: ignore[misc]
    """mlx-lm's ``QuantizedMultiLinear``."""
