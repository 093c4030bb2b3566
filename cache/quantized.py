"""Keys and values in fewer bits than the model computes in: 16, or packed in 8 or 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.layer import HostPlaces, LayerCache
from chairlift.cache.ring import Ring
from chairlift.cache.snapshot import KVPiece

# The largest float16.
LARGEST_HALF = 65504.0


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


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """Keys and values of layers without a window are stored in float16.

    The model computes in float32, and a kernel of the host reads the buffers as they are.
    """


# How keys and values are stored, if not in the type in which the model computes.
Storage = Quantization | HalfPrecision


class HalfLayer(LayerCache):
    """A layer of a float32 model with buffers in float16. Numbers beyond its range become its
    largest. All attention reads the rounded numbers, also those of a step's own tokens.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See ``LayerCache.update_and_fetch``; returns float32."""
        super().update_and_fetch(_half(keys), _half(values))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See ``LayerCache.keys_and_values``; float32."""
        keys, values = super().keys_and_values()
        return keys.astype(mx.float32), values.astype(mx.float32)

    def host_places(self, counts: Sequence[int], dtype: np.dtype[Any]) -> HostPlaces | None:
        """See ``LayerCache.host_places``, for tokens in float32."""
        half = np.dtype(np.float16)
        return super().host_places(counts, half) if dtype == np.float32 else None

    def put(self, row: int, piece: KVPiece) -> None:
        """See ``LayerCache.put``, for tokens of any type."""
        super().put(row, KVPiece(_half(piece.keys), _half(piece.values)))


def _half(numbers: mx.array) -> mx.array:
    if numbers.dtype == mx.float16:
        return numbers
    return mx.clip(numbers, -LARGEST_HALF, LARGEST_HALF).astype(mx.float16)


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
