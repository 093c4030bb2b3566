"""Mixtures of experts on CUDA: the tokens of each expert are multiplied with its weights at once.

A pair is a token and one of its experts. mlx-lm's layers sort the pairs of a step by expert if
there are at least 64. MLX's product of sorted pairs takes five times as long as ``grouped``'s
kernel, and MLX 0.32.4 computes it wrong for weights that are not quantized (seen on an H200 with
bfloat16). Its product of unsorted pairs reads an expert's weights once for each pair.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from chairlift.engine.cuda.grouped import FORMS, MAX_LISTED, Weights, grouped_product, quantize
from chairlift.engine.model.dequantize import float_type
from chairlift.engine.model.trials.trial import Trial, within_largest

log = logging.getLogger(__name__)

# The fewest unsorted pairs for which the kernel is used. On an H100, an MLP of gpt-oss's shape (32
# experts, mxfp4) took as long as with MLX's products for 16 pairs, and 64 percent of that for 32.
MIN_LISTED = 17
_TRIAL = Trial(
    within_largest(0.02),
    log,
    error="no CUDA kernel for experts: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for experts is wrong on this device; it is not used",
)


class ExpertProduct:
    """The product of tokens with the weights of a layer."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, x: mx.array, indices: mx.array, are_sorted: bool) -> mx.array | None:
        """Multiplies each token with the weights of its experts.

        Args:
            x: tokens as mlx-lm's layers have them: if sorted, ``[pairs, 1, inputs]``, else
                ``[..., 1 or experts of a token, 1, inputs]``.
            indices: the experts, ``[pairs]`` or ``[..., experts of a token]``.

        Returns:
            ``[*indices.shape, 1, outputs]``; None if the kernel does not take these tokens.
        """
        if x.dtype != self._weights.dtype or x.ndim != indices.ndim + 2 or x.shape[-2] != 1:
            return None
        if are_sorted:
            fits = x.shape[:-2] == indices.shape and indices.size > 0
        else:
            alike = x.shape[:-2] in (indices.shape, (*indices.shape[:-1], 1))
            fits = alike and MIN_LISTED <= indices.size <= MAX_LISTED
        if not fits:
            return None
        flat = x.reshape(-1, x.shape[-1])
        y = grouped_product(flat, indices.reshape(-1), self._weights, listed=not are_sorted)
        return y.reshape(*indices.shape, 1, -1)


class GroupedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """A layer with an ``own_product``."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        y = self.own_product(x, indices, sorted_indices)
        # NOTE: not as sorted, which MLX computes wrong.
        return super().__call__(x, indices) if y is None else y


class GroupedQuantizedSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """A quantized layer with an ``own_product``."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        y = self.own_product(x, indices, sorted_indices)
        return super().__call__(x, indices, sorted_indices) if y is None else y


class UnsortedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """A layer whose tokens are computed in any order."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        return super().__call__(x, indices)


def install(model: Any) -> None:
    """Replaces mlx-lm's layers of experts."""
    replaced, dtype = 0, float_type(model)
    for module in model.modules():
        if type(module) not in (SwitchLinear, QuantizedSwitchLinear):
            continue
        weights = weights_of(module, dtype)
        if (
            weights is not None
            and weights.are_fit
            and kernel_works(weights.bits, weights.group, weights.mode, weights.dtype)
        ):
            plain = type(module) is SwitchLinear
            module.own_product = ExpertProduct(weights)
            module.__class__ = GroupedSwitchLinear if plain else GroupedQuantizedSwitchLinear
            replaced += 1
        elif type(module) is SwitchLinear:
            module.__class__ = UnsortedSwitchLinear
    if replaced:
        log.info("layers of experts with one product for all: %d", replaced)


def weights_of(layer: Any, dtype: mx.Dtype) -> Weights | None:
    """The weights of a layer of experts; None if each expert has a scale of its own (nvfp4).

    ``dtype`` is the model's type.
    """
    bias = layer.get("bias")
    if type(layer) is SwitchLinear:
        return Weights(layer.weight, bias=bias)
    if layer.get("global_scale") is not None:
        return None
    arrays = layer.weight, layer.scales, layer.get("biases")
    own = None if layer.mode == "affine" else dtype
    # A layer need not name the bits and the group that its mode has.
    bits, group = FORMS.get(layer.mode, (layer.bits, layer.group_size))
    return Weights(*arrays, bits, group, bias, layer.mode, own)


@functools.cache
def kernel_works(bits: int, group: int, mode: str, dtype: mx.Dtype) -> bool:
    """Whether the kernel computes what a product for each token does, with such weights."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    experts, outputs, inputs, tokens = 5, 64, 1024, 150
    keys = mx.random.split(mx.random.key(bits), 4)
    weight = mx.random.normal((experts, outputs, inputs), dtype, key=keys[0])
    bias = mx.random.normal((experts, outputs), dtype, key=keys[1])
    # No token has expert 1, and expert 3 has the most.
    own = [0] + [2] * 9 + [3] * 100 + [4] * (tokens - 110)
    x = mx.random.normal((tokens, inputs), dtype, scale=0.02, key=keys[2])
    weights, plain = Weights(weight, bias=bias), weight
    if bits:
        weights, plain = quantize(weight, bits, group, mode, bias)
    order = [3, 0, 4, 3, 2, 4]

    def expected() -> mx.array:
        pairs = [*enumerate(own), *((n // 2, e) for n, e in enumerate(order))]
        return mx.stack([x[n] @ plain[e].T + bias[e] for n, e in pairs])

    def ours() -> mx.array:
        few = grouped_product(x[:3], mx.array(order, mx.uint32), weights, listed=True)
        return mx.concatenate([grouped_product(x, mx.array(own, mx.uint32), weights), few])

    return _TRIAL.passes(expected, ours)
