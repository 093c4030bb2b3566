"""Keys and values in 8 or 4 bits: packed in the buffers, unpacked for attention."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from chairlift.cache.layer import LayerCache
from chairlift.cache.ring import Ring


class CannotQuantize(ValueError):
    """A layer's cached vectors cannot be divided into groups of the configured size."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """MLX's affine quantization: ``bits`` per value, a scale and a bias for each ``group`` values.

    One token of one head is packed into one row of ``uint32``: the codes, then scales and biases as
    they are in memory. Buffers and snapshots therefore treat it like any keys and values.
    """

    bits: int
    group: int

    def pack(self, values: mx.array) -> mx.array:
        """``[..., dim]`` to ``[..., packed]``, uint32.

        Raises:
            CannotQuantize: ``group`` does not divide ``dim``.
        """
        if values.shape[-1] % self.group:
            raise CannotQuantize(
                f"a KV group of {self.group} does not divide the head dimension {values.shape[-1]}"
            )
        codes, *rest = mx.quantize(values, group_size=self.group, bits=self.bits)
        return mx.concatenate([codes, mx.concatenate(rest, axis=-1).view(mx.uint32)], axis=-1)

    def unpack(self, packed: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        """``[..., packed]`` to ``[..., dim]`` of ``dtype``; what rounding has lost stays lost."""
        codes = dim * self.bits // 32
        scales, biases = mx.split(packed[..., codes:].view(dtype), 2, axis=-1)
        return mx.dequantize(
            packed[..., :codes], scales, biases, group_size=self.group, bits=self.bits
        )


class QuantizedLayer(LayerCache):
    """A layer with packed buffers. Reading costs a pass over the visible columns.

    ``get`` and ``put`` exchange packed tokens too, so that a row that moves is not rounded again.
    """

    def __init__(self, ring: Ring, quantization: Quantization) -> None:
        super().__init__(ring)
        self._quantization = quantization

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See ``LayerCache.update_and_fetch``. Raises CannotQuantize."""
        pack, unpack = self._quantization.pack, self._quantization.unpack
        seen_keys, seen_values = super().update_and_fetch(pack(keys), pack(values))
        self._fetched = (
            unpack(seen_keys, keys.shape[-1], keys.dtype),
            unpack(seen_values, values.shape[-1], values.dtype),
        )
        return self._fetched
