"""Embeddings that images add to the hidden states of some layers, as Qwen3-VL's deepstack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.families import Family
from chairlift.engine.model.vision.image_inputs import places_in_span


class LayerAdditions:
    """Adds embeddings at the places of images' tokens.

    mlx-vlm's code finds these places in one row after the other, in Python. Packed calls have a row
    for each token; so the layers are given what to add at which token of the call.

    Args:
        layers: of the language model.
        targets: the numbers of those whose hidden states change, one for each addition.
        before: additions are to a layer's input; else to its output.
    """

    def __init__(self, layers: Sequence[Any], targets: Sequence[int], before: bool) -> None:
        self._places: mx.array | None = None
        self._additions: dict[int, list[mx.array]] = {}
        self._targets = targets
        for number in sorted(set(targets)):
            self._wrap(layers[number], number, before)

    @contextmanager
    def given(self, places: mx.array, additions: Sequence[mx.array]) -> Iterator[None]:
        """A context for a call with these additions, ``[places, hidden size]`` each."""
        self._places = places
        for target, addition in zip(self._targets, additions, strict=True):
            self._additions.setdefault(target, []).append(addition)
        try:
            yield
        finally:
            self._places, self._additions = None, {}

    def _wrap(self, layer: Any, number: int, before: bool) -> None:
        base: Any = type(layer)
        call: Callable[..., Any] = base.__call__

        def adding(layer: Any, hidden: mx.array, *inputs: Any, **settings: Any) -> Any:
            if before:
                return call(layer, self._added(hidden, number), *inputs, **settings)
            return self._added(call(layer, hidden, *inputs, **settings), number)

        layer.__class__ = type(base.__name__, (base,), {"__call__": adding})

    def _added(self, hidden: mx.array, number: int) -> mx.array:
        for addition in self._additions.get(number, ()):
            flat = hidden.reshape(-1, hidden.shape[-1])
            flat = flat.at[self._places].add(addition.astype(flat.dtype))
            hidden = flat.reshape(hidden.shape)
        return hidden


def layer_additions(model: Any, family: Family) -> LayerAdditions | None:
    """The ``LayerAdditions`` of mlx-vlm's ``model``; None if images add nothing to its layers."""
    if family.deepstack is None:
        return None
    layers = model.language_model.layers
    if family.deepstack == "granite4_vision":
        targets = [layer for _, layer in model.config.deepstack_layer_map or []]
        if model.config.use_spatial_sampling:
            targets += model.config.spatial_target_layers or []
        return LayerAdditions(layers, targets, before=True)
    config = getattr(model.config, "thinker_config", model.config)
    count = len(config.vision_config.deepstack_visual_indexes)
    return LayerAdditions(layers, range(count), before=False)


def additions_of(embeds: Any, image: PromptImage, family: Family) -> list[mx.array]:
    """The arrays that an image adds to each of the layers, ``[places, hidden size]``.

    Args:
        embeds: the ``deepstack_visual_embeds`` of its ``InputEmbeddingsFeatures``.
    """
    places = places_in_span(image)
    match family.deepstack:
        case "granite4_vision":
            return [embeds[number, places] for number in range(embeds.shape[0])]
        case "qwen3_omni_moe":
            return [embeds[0, places, number] for number in range(embeds.shape[2])]
    return list(getattr(embeds, "embeddings", embeds))
