"""The adapters of linear layers that are computed as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from chairlift.engine.lora.low_rank import Factors, LowRank, dimensions
from chairlift.engine.model.lora_routing import Routing


class FusedAddition:
    """Adds the products of several layers' adapters to the layers' concatenated outputs.

    To the adapters these layers are one: an adapter's matrices A lie side by side, and its matrices
    B are the blocks of one matrix that is zero elsewhere.

    Args:
        layers: the linear layers, in the order of their outputs.
        dtype: see ``LowRank``.
    """

    def __init__(self, layers: Sequence[Any], routing: Routing, dtype: mx.Dtype) -> None:
        self._widths = [dimensions(layer)[1] for layer in layers]
        self._members: list[LowRank | None] = [getattr(one, "low_rank", None) for one in layers]
        names = [member.name for member in self._members if member is not None]
        self._whole = LowRank(" and ".join(names), layers[0], routing, dtype, sum(self._widths))

    def fill(self, slots: int) -> None:
        """Takes the adapters of the layers; ``slots`` adapters are loaded in all."""
        changed = {slot for member in self._members if member for slot in member.factors}
        self._whole.fill({slot: self._joined(slot) for slot in sorted(changed)}, slots)

    def __call__(self, y: mx.array, x: mx.array) -> mx.array:
        """See ``LowRank.added``."""
        added = self._whole.added(y, x)
        if self._whole.seen:
            for member in self._members:
                if member is not None:
                    member.seen = True
        return added

    def _joined(self, slot: int) -> Factors:
        """The matrices of one adapter for all layers."""
        a, b = [], []
        start = 0
        for member, width in zip(self._members, self._widths, strict=True):
            one = member.factors.get(slot) if member is not None else None
            if one is not None:
                after = sum(self._widths) - start - width
                a.append(one.a)
                b.append(mx.pad(one.b, [(0, 0), (start, after)]))
            start += width
        return Factors(mx.concatenate(a, axis=1), mx.concatenate(b))
