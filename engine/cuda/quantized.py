"""Quantized weights on CUDA: each number of tokens gets the fastest product.

MLX's product reads the packed weight, which is the fastest way for one token. For tens of tokens
it takes up to 27 times as long as one of bfloat16 weights (measured on an H200 with 4 bits). So
several tokens are multiplied by ``grouped``'s kernel, and many with dequantized weights: kept ones
if memory allows, else they are dequantized within the step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from chairlift.engine.cuda.grouped import Weights, grouped_product, quantize
from chairlift.engine.model.dequantize import float_type
from chairlift.engine.model.trials.trial import Trial, within_largest

log = logging.getLogger(__name__)

# The most tokens for which the kernel is used instead of dequantizing within the step. On an H200
# it took a third of the time for 32 tokens; where the two cross is an estimate from there, not
# measured.
MAX_TOKENS = 128
# The most tokens for which it is used if dequantized weights are kept, by the bits of the weights.
FEW_TOKENS = {4: 32, 8: 16}
# Share of the memory beside the weights that dequantized weights may take.
SHARE = 0.25
_TRIAL = Trial(
    within_largest(0.02),
    log,
    error="no CUDA kernel for quantized weights: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for quantized weights is wrong on this device; it is not used",
)


class QuantizedWeight:
    """One weight ``[outputs, inputs]``, affine or of another of MLX's modes.

    Attributes:
        stacked: the weight as that of a single expert.

    Args:
        layer: a quantized layer of MLX with the same quantization.
        weight, scales, biases: its arrays, or those of several layers, one below the other.
    """

    def __init__(
        self, layer: Any, weight: mx.array, scales: mx.array, biases: mx.array | None
    ) -> None:
        self._arrays = weight, scales, biases
        self._form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        # Only affine weights have a type of their own.
        self._is_affine = layer.mode == "affine"
        stacked = None if biases is None else biases[None]
        self._set_stacked(
            Weights(
                *(weight[None], scales[None], stacked, layer.bits, layer.group_size),
                mode=layer.mode,
                float_type=None if self._is_affine else mx.bfloat16,
            )
        )
        self._dequantized: mx.array | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the dequantized weight."""
        return self.stacked.dtype

    def set_model_type(self, dtype: mx.Dtype) -> None:
        """Sets the type of the dequantized weight, unless the weight has a type of its own."""
        if not self._is_affine:
            self._set_stacked(self.stacked._replace(float_type=dtype))

    def _set_stacked(self, weights: Weights) -> None:
        self.stacked = weights
        form = weights.bits, weights.group, weights.mode, weights.dtype
        self._has_kernel = weights.are_fit and kernel_works(*form)

    @property
    def dequantized_bytes(self) -> int:
        """The size of the dequantized weight."""
        return self.stacked.inputs * self._arrays[0].shape[0] * self.dtype.size

    def keep_dequantized(self) -> None:
        """Dequantizes the weight once, for all later calls."""
        self._dequantized = self._dequantize()
        mx.eval(self._dequantized)

    def __call__(self, x: mx.array) -> mx.array:
        """From ``[..., inputs]`` to ``[..., outputs]``."""
        tokens = x.size // x.shape[-1]
        if tokens == 1:
            weight, scales, biases = self._arrays
            return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **self._form)
        if self._reads_packed(x):
            flat = grouped_product(x.reshape(tokens, -1), _one_expert(), self.stacked)
            return flat.reshape(*x.shape[:-1], -1)
        return x @ (self._dequantize() if self._dequantized is None else self._dequantized).T

    def added(self, x: mx.array, to: mx.array) -> mx.array:
        """The product of ``x``, plus ``to``: ``[..., outputs]``."""
        if self._dequantized is None or x.size == x.shape[-1] or self._reads_packed(x):
            return to + self(x)
        return mx.addmm(to, x, self._dequantized.T)

    def _reads_packed(self, x: mx.array) -> bool:
        """Whether the kernel multiplies ``x``."""
        if not self._has_kernel or x.dtype != self.dtype:
            return False
        most = MAX_TOKENS if self._dequantized is None else FEW_TOKENS[self.stacked.bits]
        return 0 < x.size <= most * x.shape[-1]

    def _dequantize(self) -> mx.array:
        weight, scales, biases = self._arrays
        return mx.dequantize(weight, scales, biases, dtype=self.dtype, **self._form)


class FastQuantizedLinear(QuantizedLinear):
    """A layer whose ``product`` is a ``QuantizedWeight``."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.product(x)
        return y + self["bias"] if "bias" in self else y


class FastQuantizedEmbedding(QuantizedEmbedding):
    """An embedding whose ``product`` is a ``QuantizedWeight``, used as the output layer."""

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = self.product(x)
        return y


_FAST: dict[type, type] = {
    QuantizedLinear: FastQuantizedLinear,
    QuantizedEmbedding: FastQuantizedEmbedding,
}


def install(model: Any, fused: Sequence[Any], spare_bytes: int) -> None:
    """Replaces the quantized layers of a model.

    Args:
        fused: the ``fused_linear.Product``s that take the place of some layers.
        spare_bytes: memory beside the weights, of which dequantized weights may take ``SHARE``.
    """
    products = [product.quantized for product in fused if product.quantized is not None]
    inside = {id(layer) for product in fused for layer in product.layers}
    for module in model.modules():
        if type(module) in _FAST and id(module) not in inside:
            arrays = module.weight, module.scales, module.get("biases")
            module.product = QuantizedWeight(module, *arrays)
            module.__class__ = _FAST[type(module)]
            products.append(module.product)
    dtype = float_type(model)
    for product in products:
        product.set_model_type(dtype)
    size = sum(product.dequantized_bytes for product in products)
    if not size:
        return
    if size > SHARE * spare_bytes:
        log.info("no memory for dequantized weights: %.1f GB", size / 1e9)
        return
    for product in products:
        product.keep_dequantized()
    log.info("dequantized weights for steps of several tokens: %.1f GB", size / 1e9)


@functools.cache
def kernel_works(bits: int, group: int, mode: str, dtype: mx.Dtype) -> bool:
    """Whether the kernel computes what MLX's own operations do, with such weights."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    keys = mx.random.split(mx.random.key(bits))
    weight = mx.random.normal((1, 96, 1024), dtype, key=keys[0])
    one, plain = quantize(weight, bits, group, mode)
    if not one.are_fit:
        return False
    x = mx.random.normal((71, 1024), dtype, scale=0.02, key=keys[1])
    return _TRIAL.passes(lambda: x @ plain[0].T, lambda: grouped_product(x, _one_expert(), one))


@functools.cache
def _one_expert() -> mx.array:
    return mx.zeros((1,), mx.uint32)
