"""Products of many tokens with a matrix for each head, which multi-head latent attention has.

MLX's CPU backend multiplies quantized matrices number by number (0.32.4). Here the matrices are
unpacked first, and the BLAS multiplies all heads in one call.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from chairlift.engine.cpu.gemm import Floats, products
from chairlift.engine.cpu.views import view
from chairlift.engine.model.layers.head_products import HeadProducts, QuantizedHeadProducts

# Tokens from which multiplying takes longer than unpacking the matrices.
MIN_TOKENS = 16


class _OnHost:
    """Multiplies float32 arrays of MIN_TOKENS or more in the BLAS; evaluates them."""

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """See ``HeadProducts.multiply``."""
        rows, _, length, _ = x.shape
        layer: Any = self
        if x.dtype == mx.float32 and rows * length >= MIN_TOKENS:
            matrices = layer.matrices()
            if matrices.dtype == mx.float32:
                mx.eval(x, matrices)
                return mx.array(head_products(view(x), view(matrices), transpose))
        result: mx.array = super().multiply(x, transpose)  # type: ignore[misc]
        return result


class HostHeadProducts(_OnHost, HeadProducts):
    """mlx-lm's ``MultiLinear``."""

    def matrices(self) -> mx.array:
        """``[heads, outputs, inputs]``."""
        weight: mx.array = self.weight
        return weight


class HostQuantizedHeadProducts(_OnHost, QuantizedHeadProducts):
    """mlx-lm's ``QuantizedMultiLinear``."""

    def matrices(self) -> mx.array:
        """``[heads, outputs, inputs]``, in new memory."""
        packed = self.weight, self.scales, self.get("biases")
        return mx.dequantize(*packed, self.group_size, self.bits, self.mode)


_CLASSES: dict[type, type] = {
    MultiLinear: HostHeadProducts,
    HeadProducts: HostHeadProducts,
    QuantizedMultiLinear: HostQuantizedHeadProducts,
    QuantizedHeadProducts: HostQuantizedHeadProducts,
}


def install(model: Any) -> int:
    """Replaces the products of a float32 model; returns how many."""
    layers = [layer for layer in model.modules() if type(layer) in _CLASSES]
    for layer in layers:
        layer.__class__ = _CLASSES[type(layer)]
    return len(layers)


def head_products(x: Floats, matrices: Floats, transpose: bool) -> Floats:
    """Multiplies each head's tokens with the head's matrix.

    Args:
        x: ``[rows, heads, length, inputs]``; with one head, it is multiplied with all matrices.
        matrices: ``[heads, outputs, inputs]``, or ``[heads, inputs, outputs]`` unless
            ``transpose``.

    Returns:
        ``[rows, heads, length, outputs]``; not always contiguous.
    """
    rows, own, length, inputs = x.shape
    heads = len(matrices)
    if own < heads:
        tokens = x.reshape(1, 1, rows * length, inputs)
        side_by_side = (
            matrices.reshape(-1, inputs).T
            if transpose
            else matrices.swapaxes(0, 1).reshape(inputs, -1)
        )
        product = products(tokens, side_by_side[None, None])
        return product.reshape(rows, length, heads, -1).swapaxes(1, 2)
    by_head = x.swapaxes(0, 1).reshape(1, heads, rows * length, inputs)
    product = products(by_head, (matrices.swapaxes(1, 2) if transpose else matrices)[None])
    return product.reshape(heads, rows, length, -1).swapaxes(0, 1)
