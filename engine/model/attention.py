"""Where a model's attention meets our caches: the one function that mlx-lm's model files share.

They import ``scaled_dot_product_attention`` by name, so it is replaced in each model file's own
module. With a cache that is not ours it stays mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed import PackedLayer, PackedMask, Part

_NAME = "scaled_dot_product_attention"


class Attend(Protocol):
    """Computes attention for the parts of a step, as far as it is made for them."""

    def __call__(
        self, parts: Sequence[Part], scale: float, sinks: mx.array | None
    ) -> Sequence[mx.array | None]:
        """
        Args:
            parts: queries, keys, values and masks of each part.
            scale: of the scores.
            sinks: ``[heads]``, scores of nothing that take their share of the weights; or None.

        Returns:
            ``[rows, heads, step, value dim]`` for each part; None for those it cannot do.
        """
        ...


def install(model: Any, attend: Attend | None = None) -> bool:
    """Makes a model's attention ours with our caches: by ``attend`` where it can, else as before.

    Returns:
        Whether there was one to replace.
    """
    found = False
    layers = (layer for layer in model.modules() if callable(layer))
    for names in {id(names): names for names in map(names_of, layers)}.values():
        if _NAME in names:
            original = names[_NAME]
            names[_NAME] = _ours(getattr(original, "replaces", original), attend)
            found = True
    return found


def names_of(layer: Any) -> dict[str, Any]:
    """Where a layer's code looks names up: its Python module's, which may be in no list of them."""
    names: dict[str, Any] = type(layer).__call__.__globals__
    return names


def _ours(original: Callable[..., mx.array], attend: Attend | None) -> Callable[..., mx.array]:
    def theirs(part: Part, scale: float, sinks: mx.array | None) -> mx.array:
        return original(
            part.queries,
            part.keys,
            part.values,
            cache=part.layer,
            scale=scale,
            mask=part.mask,
            sinks=sinks,
        )

    def compute(parts: Sequence[Part], scale: float, sinks: mx.array | None) -> list[mx.array]:
        ours = attend(parts, scale, sinks) if attend else [None] * len(parts)
        return [
            theirs(part, scale, sinks) if mixed is None else mixed
            for part, mixed in zip(parts, ours, strict=True)
        ]

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | PackedMask | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(mask, PackedMask):
            assert isinstance(cache, PackedLayer)
            return cache.attend(queries, mask, lambda parts: compute(parts, scale, sinks))
        if isinstance(cache, LayerCache):
            return compute([Part(cache, queries, keys, values, mask)], scale, sinks)[0]
        return original(queries, keys, values, cache, scale, mask, sinks)

    attention.replaces = original  # type: ignore[attr-defined]
    return attention
