"""Gives mlx-vlm's models the form of mlx-lm's: tokens and caches to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models import cache as lm_cache

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.deepstack import add_at_places
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.token_inputs import Positions, TokenInputs, places_of, shifts_of


class VisionModel(Module):
    """One of mlx-vlm's models.

    A call without ``given`` computes text. Within ``given``, tokens of images have the images'
    embeddings, and all tokens have the positions that their prompts' images give them.

    Args:
        model: mlx-vlm's model.
        model_type: the name of its module among ``mlx_vlm.models``.
    """

    def __init__(self, model: Any, model_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._type = model_type
        self._family = family_of(model_type)
        self._given: Sequence[TokenInputs] = ()
        if self._family.deepstack:
            add_at_places(model.language_model.model)

    @property
    def model_type(self) -> str:
        """The name of its module among ``mlx_vlm.models``."""
        return self._type

    @property
    def layers(self) -> Any:
        """The layers of the language model."""
        return self.model.language_model.layers

    def make_cache(self) -> list[Any]:
        """The caches of the language model, as mlx-lm's classes."""
        language_model = self.model.language_model
        if hasattr(language_model, "make_cache"):
            return [_as_mlx_lm(cache) for cache in language_model.make_cache()]
        return [lm_cache.KVCache() for _ in self.layers]

    def cast_predicate(self, path: str) -> bool:
        """Whether a parameter may have another type than its file's."""
        exempt = getattr(self.model, "cast_predicate", None)
        return exempt is None or bool(exempt(path.removeprefix("model.")))

    @contextmanager
    def given(self, inputs: Sequence[TokenInputs]) -> Iterator[None]:
        """A context for calls with these tokens, in the order of the flat input."""
        self._given = inputs
        try:
            yield
        finally:
            self._given = ()

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Logits ``[rows, step, vocabulary]`` of ``tokens``, ``[rows, step]``."""
        arguments: dict[str, Any] = {}
        if places := places_of(self._given):
            arguments |= self._embedded(tokens, places)
        if self._family.axes and cache is not None:
            arguments["position_ids"] = self._positions(tokens, cache)
            # mlx-vlm's method would compute positions of one sequence, and wait for the device.
            return self._with_positions(tokens, cache, **arguments)
        logits: mx.array = self.model.language_model(tokens, cache=cache, **arguments).logits
        return logits

    def _with_positions(self, tokens: mx.array, cache: Any, **arguments: Any) -> mx.array:
        language_model = self.model.language_model
        hidden = language_model.model(tokens, cache=cache, **arguments)
        logits: mx.array
        if language_model.args.tie_word_embeddings:
            logits = language_model.model.embed_tokens.as_linear(hidden)
        else:
            logits = language_model.lm_head(hidden)
        return logits

    def embeddings(self, image: PromptImage, own: Sequence[int]) -> mx.array:
        """An image's embeddings, ``[places, width]``; not evaluated.

        The width is the hidden size, or a multiple of it: what follows is added after each of the
        first layers.

        Args:
            own: the tokens of its span of the prompt.
        """
        tokens = mx.array([list(own)], mx.int32)
        arrays = {name: mx.array(_numpy(array)) for name, array in image.arrays.items()}
        pixels = arrays.pop("pixel_values", None)
        mask = arrays.pop("attention_mask", mx.ones(tokens.shape, mx.int32))
        embedded = self.model.get_input_embeddings(tokens, pixels, mask=mask, **arrays)
        places = mx.array(image.places) - image.places[0]
        parts = [embedded.inputs_embeds[0, places]]
        if self._family.deepstack:
            parts += embedded.deepstack_visual_embeds
        return mx.concatenate(parts, axis=-1)

    def shifts(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Positions | None:
        """The positions of a prompt's tokens minus their places, ``[axes, tokens]``.

        None for models whose positions are the places in the sequence.

        Raises:
            ValueError: an image has another number of places than its grid.
        """
        if not self._family.axes:
            return None
        grids = [self._grid(image) for image in images]
        positions, _ = self.model.language_model.get_rope_index(
            mx.array([list(prompt)], mx.int32), mx.array(np.concatenate(grids))
        )
        shifts = np.asarray(positions)[:, 0] - np.arange(len(prompt))
        return shifts.astype(np.int32)

    def _grid(self, image: PromptImage) -> np.ndarray[Any, Any]:
        """An image's patches in time, height and width: ``[1, 3]``."""
        grid = _numpy(image.arrays["image_grid_thw"])
        merge = self.model.config.vision_config.spatial_merge_size
        sides = [int(side) for side in grid.flat]
        # Python's numbers: these may be of any size.
        if grid.shape != (1, 3) or min(sides) < 1:
            raise ValueError("an image has no grid of patches")
        if sides[0] * (sides[1] // merge) * (sides[2] // merge) != len(image.places):
            raise ValueError("an image has another number of places than its grid")
        return grid

    def _embedded(self, tokens: mx.array, places: list[int]) -> dict[str, Any]:
        embedded = self.model.get_input_embeddings(tokens).inputs_embeds
        given = [each.embeddings for each in self._given if each.embeddings is not None]
        flat = embedded.reshape(-1, embedded.shape[-1])
        width = flat.shape[-1]
        where, new = mx.array(places), mx.concatenate(given).astype(flat.dtype)
        flat[where] = new[:, :width]
        arguments: dict[str, Any] = {"inputs_embeds": flat.reshape(embedded.shape)}
        if self._family.deepstack:
            layers = range(width, new.shape[-1], width)
            arguments["visual_pos_masks"] = where
            arguments["deepstack_visual_embeds"] = [new[:, a : a + width] for a in layers]
        return arguments

    def _positions(self, tokens: mx.array, cache: Any) -> mx.array:
        """The positions ``[axes, rows, step]`` of a step's tokens."""
        rows, step = tokens.shape
        offset = mx.array(cache[0].offset).reshape(-1, 1)
        places = mx.broadcast_to(offset + mx.arange(step), (rows, step))
        axes = self._family.axes
        if all(each.is_plain for each in self._given):
            return mx.broadcast_to(places, (axes, rows, step))
        shifts = shifts_of(self._given, axes).reshape(axes, rows, step)
        return places + mx.array(shifts)


def _numpy(array: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def _as_mlx_lm(cache: Any) -> Any:
    """An empty cache of mlx-lm like one of mlx-vlm; others are returned unchanged."""
    name = type(cache).__name__
    if type(cache) is not getattr(_vlm_caches(), name, None):
        return cache
    match name:
        case "KVCache":
            return lm_cache.KVCache()
        case "RotatingKVCache":
            return lm_cache.RotatingKVCache(cache.max_size, cache.keep)
        case "ChunkedKVCache":
            return lm_cache.ChunkedKVCache(cache.chunk_size)
        case "ArraysCache":
            return lm_cache.ArraysCache(len(cache.cache))
        case "CacheList":
            return lm_cache.CacheList(*map(_as_mlx_lm, cache.caches))
    return cache


def _vlm_caches() -> Any:
    from mlx_vlm.models import cache

    return cache
