"""Gives mlx-vlm's models the form of mlx-lm's: tokens and caches to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import cache as lm_cache

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.adapters import adapt
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.image_inputs import ImageInputs
from chairlift.engine.model.vision.layer_additions import additions_of, layer_additions
from chairlift.engine.model.vision.positions import TokenPositions
from chairlift.engine.model.vision.stages import Stage, Stages
from chairlift.engine.model.vision.together import Together
from chairlift.engine.model.vision.token_inputs import Positions, TokenInputs, places_of


class VisionModel(Module):
    """One of mlx-vlm's models.

    A call without ``given`` computes text. Within ``given``, tokens of images have the images'
    embeddings, and all tokens have the positions that their prompts' images give them.

    Args:
        model: mlx-vlm's model.
        model_type: the name of its module among ``mlx_vlm.models``.

    Attributes:
        together: which tokens of a prompt see each other.
    """

    def __init__(self, model: Any, model_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._type = model_type
        self._family = family = family_of(model_type)
        self._given: Sequence[TokenInputs] = ()
        adapt(model.language_model)
        self._inputs = ImageInputs(model, family)
        self._positions = None if family.positions == "place" else TokenPositions(model, family)
        self._additions = layer_additions(model, family)
        self._stages = Stages(model)
        self.together = Together(model, family)
        # Whether what a generated token sees depends on where its prompt ends.
        self.windows_replies = family.positions == "prompt"

    @property
    def is_placed(self) -> bool:
        """Whether tokens have the positions of a text's, and see only those before them."""
        return self._positions is None and not self.together.sees_ahead

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
        if hasattr(language_model, "make_row_caches"):
            caches: list[Any] = language_model.make_row_caches()
            return caches
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
        view = getattr(self.model.language_model, "row_caches", _as_mlx_vlm)
        cache = None if cache is None else view(cache)
        places = places_of(self._given)
        arguments = self.together.arguments(tokens.shape[1], cache, self._given)
        if not places:
            return self._logits(tokens, cache, arguments)
        arguments |= self._embedded(tokens)
        flat = arguments["inputs_embeds"].reshape(-1, arguments["inputs_embeds"].shape[-1])
        width = flat.shape[-1]
        given = [each.embeddings for each in self._given if each.embeddings is not None]
        where, new = mx.array(places), mx.concatenate(given)
        flat[where] = new[:, :width].astype(flat.dtype)
        arguments["inputs_embeds"] = flat.reshape(*tokens.shape, width)
        if self._family.marks_places:
            marked = mx.zeros(flat.shape[:1], mx.bool_)
            marked[where] = True
            arguments["visual_pos_masks"] = marked.reshape(tokens.shape)
        if self._family.has_plane:
            plane = mx.zeros((tokens.size, 2))
            plane[where] = new[:, width:]
            arguments["pos_hw"] = plane.reshape(*tokens.shape, 2)
        if self._additions is None:
            return self._logits(tokens, cache, arguments)
        columns = range(width, new.shape[-1], width)
        with self._additions.given(where, [new[:, a : a + width] for a in columns]):
            return self._logits(tokens, cache, arguments)

    def _embedded(self, tokens: mx.array) -> dict[str, Any]:
        """The embeddings of a call's tokens as text, and what layers take by token."""
        if self._family.has_table:
            return {"inputs_embeds": self.model.language_model.model.embed_tokens(tokens)}
        features = self.model.get_input_embeddings(tokens)
        arguments = {"inputs_embeds": features.inputs_embeds}
        if features.per_layer_inputs is not None:
            arguments["per_layer_inputs"] = features.per_layer_inputs
        return arguments

    def _logits(self, tokens: mx.array, cache: Any, arguments: dict[str, Any]) -> mx.array:
        language_model = self.model.language_model
        logits: mx.array
        if self._positions is None or cache is None:
            logits = language_model(tokens, cache=cache, **arguments).logits
            return logits
        # mlx-vlm's method would compute positions of one sequence, and wait for the device.
        arguments["position_ids"] = self._positions.of_step(tokens.shape, cache, self._given)
        if self.windows_replies:
            logits = language_model(tokens, cache=cache, **arguments).logits
            return logits
        hidden = language_model.model(tokens, cache=cache, **arguments)
        if hasattr(language_model, "lm_head"):
            logits = language_model.lm_head(hidden)
        else:
            logits = language_model.model.embed_tokens.as_linear(hidden)
        scale = getattr(language_model.config, "logit_scale", None)
        return logits if scale is None else logits * scale

    def embeddings(self, image: PromptImage, own: Sequence[int]) -> mx.array:
        """An image's embeddings, ``[places, width]``; see ``stages``."""
        return self.stages(image, own)[-1].output

    def stages(self, image: PromptImage, own: Sequence[int]) -> list[Stage]:
        """The modules of a tower's layers for an image, then its embeddings, ``[places, width]``.

        Nothing is evaluated, except by models whose code does so. Each array needs the one before.
        The width is the hidden size, or a multiple of it: what follows is added after each of the
        first layers. Of types with ``has_plane``, two coordinates follow.

        Args:
            own: the tokens of its span of the prompt.

        Raises:
            RequestError: the model's code refuses the image, though its processor takes it. For
                some types, such images are very long ones.
        """
        try:
            with self._stages.recorded() as stages:
                embedded = self._inputs.embedded(image, own)
            parts = [self._inputs.at_places(embedded.inputs_embeds, image)]
            if self._additions is not None:
                parts += additions_of(embedded.deepstack_visual_embeds, image, self._family)
            if self._family.has_plane:
                parts.append(self._inputs.at_places(embedded.pos_hw, image))
        except (AssertionError, IndexError, ValueError) as error:  # what checks of sizes raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RequestError(f"messages: the model cannot take an image: {reason}") from error
        return [*stages, Stage("embeddings", mx.concatenate(parts, axis=-1))]

    def shifts(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Positions | None:
        """The positions of a prompt's tokens minus their places; see ``TokenPositions``.

        None for models whose positions are the places in the sequence. With ``windows_replies``,
        where the prompt ends.
        """
        return self._positions.shifts(prompt, images) if self._positions else None


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


def _as_mlx_vlm(caches: Any) -> Any:
    """The layers of a step, in mlx-vlm's lists where a layer has several."""
    if not any(type(cache) is lm_cache.CacheList for cache in caches):
        return caches
    kind = _vlm_caches().CacheList
    return [kind(*c.caches) if type(c) is lm_cache.CacheList else c for c in caches]


def _vlm_caches() -> Any:
    from mlx_vlm.models import cache

    return cache
