"""Depthwise convolutions over time, the short ones of recurrent layers, as sums of products.

For a convolution of each channel on its own MLX's CPU backend takes 40 times as long as one pass
over the input (0.32.4); on CUDA MLX calls cuDNN, which has a plan for each length. Here the input
is multiplied with each tap of the kernel, shifted, in one fused operation for any length.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d

log = logging.getLogger(__name__)

# Taps of a kernel: more of them are as many inputs of the fused operation.
MAX_TAPS = 8


class DepthwiseConv1d(Conv1d):
    """A convolution of each channel on its own. Sums are in float32."""

    def __call__(self, x: mx.array) -> mx.array:
        """``[rows, length, channels]`` → ``[rows, length + 2 * padding - taps + 1, channels]``."""
        if self.padding:
            x = mx.pad(x, [(0, 0), (self.padding, self.padding), (0, 0)])
        length = x.shape[1] - len(self._taps) + 1
        result = _sum([x[:, tap : tap + length] for tap in range(len(self._taps))], self._taps)
        return result + self.bias if "bias" in self else result


def install(model: Any) -> int:
    """Replaces the depthwise convolutions of a model; returns how many.

    Their weights must not change any more.
    """
    layers = [layer for layer in model.modules() if _is_depthwise(layer)]
    for layer in layers:
        # Not a parameter, because its name begins with an underscore.
        layer._taps = [mx.contiguous(layer.weight[:, tap, 0]) for tap in range(_taps(layer))]
        mx.eval(layer._taps)
        layer.__class__ = DepthwiseConv1d
    if layers:
        log.info("depthwise convolutions: %d", len(layers))
    return len(layers)


def _is_depthwise(layer: Any) -> bool:
    return (
        type(layer) is Conv1d
        and layer.groups == layer.weight.shape[0] > 1
        and layer.weight.shape[2] == 1
        and (layer.stride, layer.dilation) == (1, 1)
        and _taps(layer) <= MAX_TAPS
    )


def _taps(layer: Conv1d) -> int:
    return int(layer.weight.shape[1])


@partial(mx.compile, shapeless=True)
def _sum(shifted: Sequence[mx.array], taps: Sequence[mx.array]) -> mx.array:
    products = [
        x.astype(mx.float32) * w.astype(mx.float32) for x, w in zip(shifted, taps, strict=True)
    ]
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total.astype(shifted[0].dtype)
