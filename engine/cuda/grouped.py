"""Products of tokens with the weights of their experts, plain or quantized, in one kernel.

Few tokens of each expert read all its weights, so such a product should take as long as reading
them once. MLX's own takes several times as long from a few tokens on. A layer without experts
counts as one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.source import included

_WARPS = 4
DTYPES = (mx.bfloat16, mx.float16)
# MLX's quantizations, in the order of ``grouped_header.cuh``, and the bits and groups of those that
# are not affine.
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
FORMS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


class Weights(NamedTuple):
    """The weights of some experts.

    Attributes:
        weight: ``[experts, outputs, inputs]``; if quantized, packed uint32.
        scales, biases: ``[experts, outputs, inputs / group]``; None if not quantized. Only affine
            weights have biases.
        bits, group: of the quantization; 0 and 0 if not quantized.
        bias: ``[experts, outputs]``, added to the products, or None.
        mode: of the quantization, one of MODES.
        float_type: the type of tokens and products, if the scales are integers; else None.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group: int = 0
    bias: mx.array | None = None
    mode: str = "affine"
    float_type: mx.Dtype | None = None

    @property
    def inputs(self) -> int:
        width: int = self.weight.shape[-1]
        return width * 32 // self.bits if self.bits else width

    @property
    def dtype(self) -> mx.Dtype:
        """The type of tokens and products."""
        if self.float_type is not None:
            return self.float_type
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def are_fit(self) -> bool:
        """Whether the kernel can read these weights."""
        added = (array for array in (self.biases, self.bias) if array is not None)
        return (
            self.dtype in DTYPES
            and all(array.dtype == self.dtype for array in added)
            and self.weight.shape[-2] % 32 == 0
            and self._has_known_form
        )

    @property
    def _has_known_form(self) -> bool:
        if not self.bits:
            return self.inputs % 32 == 0
        whole = self.inputs % max(self.group, 128 // self.bits) == 0
        if self.mode == "affine":
            return whole and self.bits in (4, 8) and self.group >= 32 and self.biases is not None
        return whole and FORMS.get(self.mode) == (self.bits, self.group)


def quantize(
    weight: mx.array, bits: int, group: int, mode: str, bias: mx.array | None = None
) -> tuple[Weights, mx.array]:
    """Quantizes ``[experts, outputs, inputs]``, and dequantizes the result; both for trials."""
    form: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
    packed, scales, *rest = mx.quantize(weight, **form)
    biases = rest[0] if rest else None
    own_type = weight.dtype if biases is None else None
    weights = Weights(packed, scales, biases, bits, group, bias, mode, own_type)
    return weights, mx.dequantize(packed, scales, biases, dtype=weight.dtype, **form)


def grouped_product(x: mx.array, experts: mx.array, weights: Weights) -> mx.array:
    """Multiplies each token with the weight of its expert: ``[tokens, outputs]``.

    Args:
        x: ``[tokens, inputs]``, sorted by expert.
        experts: ``[tokens]``, ascending; ignored if there is only one expert.
        weights: must be fit.
    """
    count, outputs = weights.weight.shape[:2]
    tokens = x.shape[0]
    # On an H100 warps with 32 rows of a weight take three quarters of the time of those with 16,
    # for 128 experts in integers of 4 bits; for mxfp4 they take longer.
    rows = 2 if count == 1 or (weights.bits, weights.mode) == (4, "affine") else 1
    nothing = _nothing(x.dtype)
    result: mx.array
    (result,) = _kernel()(
        inputs=[
            *(x, experts, weights.weight),
            *(nothing if each is None else each for each in weights[1:3]),
            nothing if weights.bias is None else weights.bias,
        ],
        template=[
            *(("T", x.dtype), ("BFLOAT", x.dtype == mx.bfloat16), ("ONE", count == 1)),
            *(("BITS", weights.bits), ("GROUP", max(1, weights.group))),
            ("MODE", MODES.index(weights.mode)),
            *(("BIAS", weights.bias is not None), ("WARPS", _WARPS), ("ROWS", rows)),
        ],
        grid=(outputs // (16 * rows) * _WARPS * 32, count, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(tokens, outputs)],
        output_dtypes=[x.dtype],
    )
    return result


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_grouped_product",
        input_names=["x", "experts", "weight", "scales", "biases", "bias"],
        output_names=["out"],
        header=included("ptx", "grouped_header"),
        source=included("grouped"),
    )


@functools.cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((1,), dtype)
