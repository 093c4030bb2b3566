"""The arguments and results of ``get_input_embeddings`` for one image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.families import Family
from chairlift.engine.model.vision.image_arrays import mlx_of, numpy_of


class ImageInputs:
    """Calls a model with one image alone.

    Args:
        model: mlx-vlm's model.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self._model = model
        self._family = family
        # The token that stands for an image in prompts that the model lengthens.
        self._mark = int(family.mark or getattr(model.config, "image_token_index", None) or 0)

    def embedded(self, image: PromptImage, own: Sequence[int]) -> Any:
        """mlx-vlm's ``InputEmbeddingsFeatures`` of an image and the tokens between its own.

        Args:
            own: the tokens of its span of the prompt.

        Raises:
            ValueError: an index is not one of a token of the span.
        """
        tokens = mx.array([self._tokens(image, own)], mx.int32)
        arrays = {**self._arrays(image), **self._derived(image)}
        if self._family.derived == "records":
            arrays = {"pixel_values": [[_record(arrays)]]}
        pixels = arrays.pop("pixel_values", None)
        mask = arrays.pop("attention_mask", mx.ones(tokens.shape, mx.int32))
        return self._model.get_input_embeddings(tokens, pixels, mask=mask, **arrays)

    def at_places(self, embedded: mx.array, image: PromptImage) -> mx.array:
        """An image's embeddings, ``[places, width]``, among ``[1, tokens, width]``.

        Raises:
            ValueError: the model makes another number of embeddings than the image has places.
        """
        whole = self._family.tokens == "each"
        tokens = _length(image) if whole else len(image.places)
        rows = embedded[0, self._family.lead :]
        rows = rows[:tokens] if self._family.closes else rows
        if rows.shape[0] != tokens:
            raise ValueError(
                f"the model makes {rows.shape[0]} embeddings of an image with {tokens} tokens"
            )
        return rows[places_in_span(image)] if whole else rows

    def _tokens(self, image: PromptImage, own: Sequence[int]) -> list[int]:
        match self._family.tokens:
            case "each":
                ends = [self._model.config.image_end_token_id] * 2 if self._family.closes else []
                return [*own, *ends]
            case "one":
                return [self._mark]
        return [self._mark] * len(image.places)

    def _arrays(self, image: PromptImage) -> dict[str, Any]:
        """The processor's output for an image, by parameter: arrays, and lists of arrays."""
        vision = getattr(self._model.config, "vision_config", None)
        positions = ("position_embedding_size", "mm_posemb_size")
        pixels = image.arrays.get("pixel_values")
        # The sizes of the arrays that mlx-vlm's code indexes without a check, by parameter.
        sizes = {
            "image_input_idx": _length(image),
            "image_position_ids": max(getattr(vision, name, 0) for name in positions),
            "num_crops": 0 if pixels is None else pixels.shape[0] + 1,
            "image_token_pooling": 0 if pixels is None else math.prod(pixels.shape[:2]),
        }
        for name in sizes.keys() & image.arrays.keys():
            if numpy_of(image.arrays[name]).max(initial=0) >= sizes[name]:
                raise ValueError(f"an image's {name} are beyond what they index")
        flat = [(name, mlx_of(array)) for name, array in image.arrays.items()]
        nested: dict[str, Any] = tree_unflatten(flat)
        lists = {name: nested[name].tolist() for name in self._family.listed & nested.keys()}
        return nested | lists

    def _derived(self, image: PromptImage) -> dict[str, Any]:
        """The parameter that says where an image's tokens are."""
        places = [place - image.places[0] for place in image.places]
        match self._family.derived:
            case "images_seq_mask":
                mask = np.zeros((1, _length(image)), bool)
                mask[0, places] = True
                return {"images_seq_mask": mx.array(mask)}
            case "image_bound":
                runs = np.split(np.array(places), np.flatnonzero(np.diff(places) > 1) + 1)
                bounds = np.array([(run[0], run[-1] + 1) for run in runs])
                return {"image_bound": [bounds]}
        return {}


def _record(arrays: Mapping[str, mx.array]) -> SimpleNamespace:
    """An image as DeepSeek's processor has it, at the first of its tokens."""
    height, width = (int(side) for side in arrays["sides"])
    return SimpleNamespace(
        start=0,
        patches=arrays["patches"],
        n_vit_h=height,
        n_vit_w=width,
        types=[int(kind) for kind in arrays["types"]],
    )


def places_in_span(image: PromptImage) -> mx.array:
    """Which tokens of its span are the image's."""
    return mx.array(image.places) - image.places[0]


def _length(image: PromptImage) -> int:
    return image.places[-1] + 1 - image.places[0]
