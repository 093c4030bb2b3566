"""Dequantizes the layers of a model that computes in float32."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

QUANTIZED = (QuantizedLinear, QuantizedEmbedding, QuantizedSwitchLinear)


def dequantize_model(model: Module) -> Module:
    """Replaces quantized layers by layers with float32 weights.

    mlx-lm's function makes bfloat16 weights of quantizations without biases, and leaves out the
    scale that nvfp4 may have for each expert.
    """
    weights = [
        (f"{path}.weight", _weight(layer))
        for path, layer in model.named_modules()
        if isinstance(layer, QUANTIZED)
    ]
    model = utils.dequantize_model(model)
    model.load_weights(weights, strict=False)
    return model


def float_type(model: Module) -> mx.Dtype:
    """The type of most floating-point parameters; bfloat16 if there are none.

    Quantized weights have no such type if their scales are integers (mxfp4, nvfp4, mxfp8).
    """
    counts: Counter[mx.Dtype] = Counter({mx.bfloat16: 0})
    parameters: Any = tree_flatten(model.parameters())
    for _, array in parameters:
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] += array.size
    return counts.most_common(1)[0][0]


def group_size(model: Module) -> int:
    """The weights that share a scale in most quantized layers; 0 if there are none."""
    layers = (layer for layer in model.modules() if isinstance(layer, QUANTIZED))
    counts = Counter(layer.group_size for layer in layers)
    return counts.most_common(1)[0][0] if counts else 0


def _weight(layer: Any) -> mx.array:
    """The float32 weight of a quantized layer."""
    dequantize = partial(
        mx.dequantize,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )
    expert_scales = layer.get("global_scale")
    if expert_scales is None:
        return dequantize(layer.weight, layer.scales, layer.get("biases"))
    experts = zip(layer.weight, layer.scales, expert_scales, strict=True)
    return mx.stack(
        [dequantize(weight, scales, global_scale=scale) for weight, scales, scale in experts]
    )
