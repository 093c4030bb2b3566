"""Products of tokens with the weights of their experts, plain or quantized, in one kernel.

With few tokens for each expert, reading the weights takes most of the time, so the kernel reads
them once for all tokens. MLX's own product takes several times as long from a few tokens on. A
layer without experts is treated as one with a single expert.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.source import included, launch_bounds

# Rows of a weight that a block multiplies.
_ROWS = 32
# Streaming multiprocessors of an H100 or H200. The numbers of warps were measured on an H100.
_PROCESSORS = 132
# The most pairs of a token and an expert that a block lists.
MAX_LISTED = 64
DTYPES = (mx.bfloat16, mx.float16)
# MLX's quantizations, in the order of ``grouped_header.cuh``, and the bits and groups of those that
# are not affine.
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
FORMS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
# The inputs of a kernel for such products.
INPUT_NAMES = ["x", "experts", "weight", "scales", "biases", "bias", "read", "written"]


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
    def arrays(self) -> list[mx.array]:
        """A kernel's inputs from ``weight`` to ``bias``; of one number those that there are not."""
        others = self.scales, self.biases, self.bias
        return [self.weight, *(_nothing(self.dtype) if each is None else each for each in others)]

    @property
    def template(self) -> list[tuple[str, int]]:
        """A kernel's template arguments for the form of the weights."""
        return [
            *(("BITS", self.bits), ("GROUP", max(1, self.group))),
            *(("MODE", MODES.index(self.mode)), ("BIAS", self.bias is not None)),
        ]

    @property
    def are_fit(self) -> bool:
        """Whether the kernel can read these weights."""
        added = (array for array in (self.biases, self.bias) if array is not None)
        return (
            self.dtype in DTYPES
            and all(array.dtype == self.dtype for array in added)
            and self.weight.shape[-2] % _ROWS == 0
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


class PairRows(NamedTuple):
    """The rows that the pairs of a token and an expert have among tokens and products.

    Attributes:
        read: of its token, ``[pairs]`` uint32; None: pair n has row n.
        written: of its product, likewise; each row once.
    """

    read: mx.array | None = None
    written: mx.array | None = None

    @property
    def inputs(self) -> list[mx.array]:
        """A kernel's inputs ``read`` and ``written``; of one number if pair n has row n."""
        return [_nothing(mx.uint32) if each is None else each for each in self]


IN_ORDER = PairRows()


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


def grouped_product(
    x: mx.array,
    experts: mx.array,
    weights: Weights,
    rows: PairRows = IN_ORDER,
    *,
    listed: bool = False,
) -> mx.array:
    """Multiplies each token with the weights of its experts: ``[pairs, outputs]``.

    A pair is a token and one of its experts.

    Args:
        x: ``[tokens, inputs]``; if ``listed``, each token has equally many pairs, one after the
            other.
        experts: ``[pairs]``, ascending unless ``listed``; ignored if there is only one expert.
        weights: must be fit.
        rows: of each pair, unless ``listed``.
        listed: whether the experts are in any order, at most ``MAX_LISTED``.
    """
    count, outputs = weights.weight.shape[:2]
    one = count == 1 and not listed and rows is IN_ORDER
    pairs = len(x) if one else len(experts)
    few = pairs <= 8 * max(count, 2)
    # Most small floats times their scale are computed in float32 if tokens are float16, because
    # scales exceed float16's range. That takes more registers.
    light = few and (x.dtype == mx.bfloat16 or weights.mode == "affine")
    width = weights.inputs * (weights.bits or 16) // 8
    warps, blocks = block_of(outputs // _ROWS * min(count, pairs), width, light, not weights.bits)
    result: mx.array
    (result,) = _kernel(warps, blocks)(
        inputs=[x, experts, *weights.arrays, *rows.inputs],
        template=[
            *(("T", x.dtype), ("BFLOAT", x.dtype == mx.bfloat16)),
            *(("ONE", one), ("LISTED", listed)),
            *weights.template,
            *(("WARPS", warps), ("ROWS", _ROWS // 16)),
            *(("MOST", 2 if few else 4), ("MAX_LISTED", MAX_LISTED if listed else 1)),
        ],
        grid=(outputs // _ROWS * warps * 32, pairs if listed else count, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(pairs, outputs)],
        output_dtypes=[x.dtype],
    )
    return result


def block_of(blocks: int, width: int, light: bool, plain: bool) -> tuple[int, int]:
    """The warps of a block, and how many blocks a processor has registers for.

    The warps of a block divide the inputs, and their sums are added at the end, which takes longer
    for more warps. But the warps of all blocks together should fill the processors.

    Args:
        blocks: of the product.
        width: of a row of the weight in bytes.
        light: whether a thread needs few registers.
        plain: whether the weights are not quantized. Their rows are longer, so that more warps read
            more of a row at once.
    """
    most = 16 if light else 10  # warps of a processor
    least = 4 if plain else 2
    # A warp reads 64 bytes of a row at a time.
    warps = least
    while warps * blocks < most * _PROCESSORS and 2 * warps <= min(8, width // 64):
        warps *= 2
    return warps, most // warps


@functools.cache
def _kernel(warps: int, blocks: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"chairlift_grouped_product_{warps}_{blocks}",
        input_names=INPUT_NAMES,
        output_names=["out"],
        header=included("ptx", "products/grouped_header") + launch_bounds(warps * 32, blocks),
        source=included("products/grouped"),
    )


@functools.cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((1,), dtype)
