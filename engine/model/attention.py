"""Connects a model's attention with the engine's caches.

All model files of mlx-lm call ``scaled_dot_product_attention``, which they import by name. So it is
replaced in the module of each model file. With caches that are not the engine's, mlx-lm's function
still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer, Part
from chairlift.cache.pages.dense import DenseCache
from chairlift.cache.pages.kernels import Scoring
from chairlift.cache.pages.latent import LatentLayer
from chairlift.cache.pages.layer import PagedMask
from chairlift.engine.model.recorder import record

_NAME = "scaled_dot_product_attention"
# Attributes in which mlx-lm's attention layers keep the number of their query heads.
_HEAD_COUNTS = ("n_heads", "num_heads", "num_attention_heads", "n_head")


class Attend(Protocol):
    """Computes attention for those parts of a step that it supports."""

    def __call__(
        self, parts: Sequence[Part], scale: float, sinks: mx.array | None
    ) -> Sequence[mx.array | None]:
        """Computes attention of each part.

        Args:
            parts: queries, keys, values and masks of each part.
            scale: factor of the scores.
            sinks: ``[heads]``, a score of each head that takes weight but adds no value; or None.

        Returns:
            ``[rows, heads, step, value dim]`` for each part; None for unsupported ones.
        """
        ...


class Attention(NamedTuple):
    """A ``HostCall``: attention to a cache, of queries, keys and values, and perhaps sinks.

    Attributes:
        function: has mlx-lm's arguments; None: there is none, only what the host computes.
        softcap: bounds the scores: ``softcap * tanh(score / softcap)``; None: nothing does.
    """

    function: Callable[..., mx.array] | None
    scale: float
    softcap: float | None = None


class LatentAttention(NamedTuple):
    """A ``HostCall``: multi-head latent attention, of queries and latents.

    Its third input is what a layer passes as a mask: the products of its rotary queries, already
    multiplied by the scale, with the rotary keys.
    """

    scale: float


def install(model: Any, attend: Attend | None = None) -> bool:
    """Replaces a model's attention by ``attend``, and by mlx-lm's function for unsupported parts.

    Returns:
        Whether the model calls ``scaled_dot_product_attention`` at all.
    """
    found = False
    layers = (layer for layer in model.modules() if callable(layer))
    for names in {id(names): names for names in map(names_of, layers)}.values():
        if _NAME in names:
            original = names[_NAME]
            names[_NAME] = _with_caches(getattr(original, "replaces", original), attend)
            found = True
    return found


def calls_attention(layer: Any) -> bool:
    """Whether the module of a layer's code imports the function that ``install`` replaces."""
    return callable(layer) and _NAME in names_of(layer)


def caps_scores(layer: Any) -> bool:
    """Whether an attention layer caps its scores, which mlx-lm's function cannot do for it."""
    return bool(getattr(layer, "attn_logit_softcapping", None))


def names_of(layer: Any) -> dict[str, Any]:
    """The globals of the module with a layer's code, which may be missing in ``sys.modules``."""
    own = type(layer)
    names: dict[str, Any] = getattr(own, "original_class", own).__call__.__globals__
    return names


def _with_caches(
    original: Callable[..., mx.array], attend: Attend | None
) -> Callable[..., mx.array]:
    def by_mlx_lm(part: Part, scale: float, sinks: mx.array | None) -> mx.array:
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
            by_mlx_lm(part, scale, sinks) if mixed is None else mixed
            for part, mixed in zip(parts, ours, strict=True)
        ]

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | PackedMask | PagedMask | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        shape = *queries.shape[:-1], values.shape[-1]
        if isinstance(mask, mx.array) and values is keys and sinks is None:
            stand_in = record(LatentAttention(scale), [queries, keys, mask], shape)
        else:
            inputs = [queries, keys, values, *([] if sinks is None else [sinks])]
            stand_in = record(Attention(attention, scale), inputs, shape)
            if stand_in is not None and mask is not None:
                raise ValueError("a layer makes a mask of its own")
        if stand_in is not None:
            return stand_in
        if isinstance(mask, PagedMask):
            return mask.step.attend(queries, keys, cache, Scoring(scale, mask.window, sinks))
        if isinstance(mask, PackedMask):
            assert isinstance(cache, PackedLayer)
            return cache.attend(
                queries, keys, values, mask, lambda parts: compute(parts, scale, sinks)
            )
        if isinstance(cache, LatentLayer):
            if not isinstance(mask, mx.array) or sinks is not None:
                raise ValueError("latent attention without rotary queries, or with sinks")
            return cache.attend(queries, keys, values, mask, scale)
        if isinstance(cache, LayerCache | DenseCache):
            return compute([Part(cache, queries, keys, values, mask)], scale, sinks)[0]
        return original(queries, keys, values, cache, scale, mask, sinks)

    attention.replaces = original  # type: ignore[attr-defined]
    return attention


def score_heads(model: Any) -> int | None:
    """The largest number of query heads of a layer that keeps its scores; None if none does.

    These are the layers that do not call mlx-lm's attention function, because their model file
    does not or they cap their scores, and multi-head latent attention, which passes a part of its
    scores to that function as a mask.
    """
    counts = [
        count
        for layer in model.modules()
        for name in _HEAD_COUNTS
        if isinstance(count := getattr(layer, name, None), int)
        and (hasattr(layer, "qk_rope_head_dim") or caps_scores(layer) or not calls_attention(layer))
    ]
    return max(counts, default=None)
