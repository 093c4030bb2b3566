"""Quantized weights, and the panels in which the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import QuantizedEmbedding
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.dot_tiles import QUAD, QUADS
from chairlift.engine.cpu.compiled.llvm.quantized import BITS, record_bytes
from chairlift.engine.cpu.views import view, weight_memory

# The inputs of a group; the kernel takes 1,024 inputs at a time.
_GROUPS = (32, 64, 128)
# The group and the bits of mxfp4, which a layer need not name.
_MXFP4 = 32, 4
# Exponents of the scales of floats have this bias. Six times the scale of a larger one is infinite.
_EXPONENT_BIAS, _MAX_EXPONENT = 127, 250
# Panels that are packed together.
_AT_ONCE = 32


class PanelLayout(NamedTuple):
    """How a kernel reads panels.

    Attributes:
        lanes: numbers of 32 bits in a register.
        by_quads: the codes of four inputs of an output are side by side (``llvm.dot``); otherwise
            those of one input (``llvm.quantized``).
    """

    lanes: int
    by_quads: bool

    @property
    def outputs(self) -> int:
        """The outputs of a panel."""
        return WIDE * self.lanes


class Quantized(NamedTuple):
    """A weight that MLX has quantized: ``code * scale + bias``, with those of its group of inputs.

    Attributes:
        weight: packed codes, ``[..., outputs, words]`` uint32.
        scales: ``[..., outputs, inputs / group]``; the exponents of powers of two, if there are no
            biases.
        biases: as many; None if codes are floats of 4 bits (mxfp4).
        group, bits: of the quantization.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group: int
    bits: int

    @classmethod
    def of(cls, layer: Any) -> Quantized | None:
        """The weight of a layer that computes in float32; None if the kernel cannot read it."""
        biases = layer.get("biases")
        if layer.mode == "mxfp4" and not isinstance(layer, QuantizedEmbedding):
            # The largest number of a group must be finite.
            if layer.scales.max().item() > _MAX_EXPONENT:
                return None
            return cls(layer.weight, layer.scales, None, *_MXFP4)
        if layer.mode != "affine" or biases is None or layer.group_size not in _GROUPS:
            return None
        if layer.scales.dtype != mx.float32:
            return None
        return cls(layer.weight, layer.scales, biases, layer.group_size, layer.bits)

    @classmethod
    def joined(cls, weights: Sequence[Quantized]) -> Quantized:
        """One weight with the outputs of several of the same form."""
        biases = [one.biases for one in weights if one.biases is not None]
        return weights[0]._replace(
            weight=mx.concatenate([one.weight for one in weights], axis=-2),
            scales=mx.concatenate([one.scales for one in weights], axis=-2),
            biases=mx.concatenate(biases, axis=-2) if biases else None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., outputs, inputs]``."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group)

    @property
    def kind(self) -> str:
        """The kind of the panels."""
        return "e2m1" if self.biases is None else "nibble" if self.bits <= 4 else "byte"

    @property
    def form(self) -> tuple[str, int, int]:
        """What weights must have in common to be joined."""
        return self.kind, self.group, self.bits

    def panel_bytes(self, layout: PanelLayout) -> int:
        """The bytes that the panels take."""
        *matrices, outputs, inputs = self.shape
        panels = -(-outputs // layout.outputs) * int(np.prod(matrices, dtype=np.int64))
        return panels * (inputs // self.group) * record_bytes(self.kind, layout.lanes, self.group)

    def packed(self, layout: PanelLayout) -> NDArray[np.uint8]:
        """The panels, ``[panels, groups, bytes of a record]``, of matrix after matrix.

        Outputs behind the last one of a matrix have zeros.
        """
        *matrices, outputs, inputs = self.shape
        count = int(np.prod(matrices, dtype=np.int64))
        record = record_bytes(self.kind, layout.lanes, self.group)
        each = -(-outputs // layout.outputs)
        size = count * each * (inputs // self.group) * record
        panels = weight_memory(size).reshape(count, each, inputs // self.group, record)
        for number, place in enumerate(panels):
            one = self._matrix(number, count)
            for start in range(0, each, _AT_ONCE):
                one._pack(place[start : start + _AT_ONCE], start * layout.outputs, layout)
        return panels.reshape(count * each, inputs // self.group, record)

    def _matrix(self, number: int, count: int) -> Quantized:
        """One of the weight's ``count`` matrices."""

        def of(array: mx.array) -> mx.array:
            return array.reshape(count, *array.shape[-2:])[number]

        biases = None if self.biases is None else of(self.biases)
        return self._replace(weight=of(self.weight), scales=of(self.scales), biases=biases)

    def _pack(self, panels: NDArray[np.uint8], start: int, layout: PanelLayout) -> None:
        """Writes the panels of the outputs from ``start`` on."""
        width = layout.outputs
        stop = min(start + len(panels) * width, self.shape[0])
        scales = self.scales[start:stop].astype(mx.float32)
        if self.biases is None:
            powers = 2.0 ** (scales - _EXPONENT_BIAS)
            scales, biases = powers / 2, -6 * powers
        else:
            biases = self.biases[start:stop].astype(mx.float32)
        ones, zeros = mx.ones(scales.shape), mx.zeros(scales.shape)
        codes = mx.dequantize(self.weight[start:stop], ones, zeros, self.group, self.bits)
        # [panels, groups, inputs of a group, outputs of a panel]
        by_input = _by_panel(view(codes.astype(mx.uint8)), len(panels), width, self.group)
        if layout.by_quads:
            by_input = _by_quads(by_input, self.kind, layout)
        elif BITS[self.kind] == 4:
            by_input = by_input[..., : width // 2] | by_input[..., width // 2 :] << 4
        parts = [
            _by_panel(view(part), len(panels), width, 1).view(np.uint8) for part in (scales, biases)
        ]
        places = np.split(panels, [4 * width, 8 * width], axis=2)
        for place, part in zip(places, [*parts, by_input], strict=True):
            place[:] = part.reshape(place.shape)


def _by_panel(numbers: NDArray[Any], panels: int, width: int, group: int) -> NDArray[Any]:
    """``[outputs, inputs]`` → ``[panels, groups, inputs of a group, width]``, contiguous."""
    padded = np.zeros((panels * width, numbers.shape[1]), numbers.dtype)
    padded[: len(numbers)] = numbers
    split = padded.reshape(panels, width, -1, group)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1))


def _by_quads(codes: NDArray[np.uint8], kind: str, layout: PanelLayout) -> NDArray[np.uint8]:
    """``[panels, groups, inputs of a group, width]`` as ``llvm.dot`` reads it."""
    panels, groups, inputs, _ = codes.shape
    split = codes.reshape(panels, groups, inputs // QUAD, QUAD, WIDE, layout.lanes)
    quads = split.transpose(0, 1, 2, 4, 5, 3)
    if QUADS[kind] == 1:
        return quads
    return quads[:, :, 0::2] | quads[:, :, 1::2] * np.uint8(16)
