"""Tokens of a prompt that see each other, also those behind them, and the masks for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.adapters.rows import has_rows
from chairlift.engine.model.vision.families import Family
from chairlift.engine.model.vision.token_inputs import TokenInputs


class Together:
    """The tokens of a prompt that see each other; all others see only those in front of them.

    Args:
        model: mlx-vlm's model.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self._config = model.config
        text = getattr(model.config, "text_config", None)
        setting = getattr(text, "use_bidirectional_attention", None)
        # Some models of these types have an ordinary mask.
        switched_on = {"image": setting == "vision", "prompt": bool(setting)}
        self._kind = family.together if switched_on.get(family.together or "", True) else None

    @property
    def sees_ahead(self) -> bool:
        """Whether a token can see those behind it."""
        return self._kind is not None

    def runs(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> tuple[range, ...]:
        """The tokens of a prompt that see each other: successive ones, in order."""
        match self._kind:
            case "image":
                return _successive(images)
            case "block":
                return tuple(self._block(prompt, image) for image in images)
            case "prompt":
                return (range(len(prompt)),)
        return ()

    def arguments(self, length: int, cache: Any, inputs: Sequence[TokenInputs]) -> dict[str, Any]:
        """The language model's arguments for that, in a call with ``length`` tokens a row."""
        if self._kind is None or cache is None or not has_rows(cache[0]):
            return {}
        runs = _numbers(inputs)
        if self._kind == "image":
            return {} if runs is None else {"mm_token_type_ids": runs}
        if runs is not None:
            return {"mask": mask_of(length, cache[0], None, runs)}
        # Without one, a model whose prompts see all of themselves has no mask.
        return {"mask": cache[0].make_mask(length, return_array=length > 1)}

    def _block(self, prompt: Sequence[int], image: PromptImage) -> range:
        """An image's tokens, and the special ones in front of them."""
        start = image.places[0]
        for place in reversed(range(start)):
            if prompt[place] == self._config.image_cls_token_id:
                start = place
            if prompt[place] in (self._config.image_cls_token_id, self._config.img_end_id):
                break
        return range(start, image.places[-1] + 1)


def mask_of(length: int, cache: Any, window: int | None, runs: mx.array) -> mx.array:
    """The mask of one row, in which tokens of a run see each other.

    Args:
        cache: the layer's.
        window: the model's; None for none.
        runs: ``[1, length]``, the number of the run that each token is in, from 1 on, or 0.
    """
    seen = cache.make_mask(length, window_size=window, return_array=True)
    # Which of the chunk's tokens is in a column, by query: [1, length, columns].
    column = mx.arange(length)[:, None] - cache.ring.behind(length)
    inside = (column >= 0) & (column < length)
    run = runs[0][mx.clip(column, 0, length - 1)]
    own = runs[0][:, None]
    mask: mx.array = seen | (inside & (run == own) & (own > 0))[:, None]
    return mask


def _successive(images: Sequence[PromptImage]) -> tuple[range, ...]:
    """The successive tokens of images."""
    runs: list[range] = []
    for place in (place for image in images for place in image.places):
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return tuple(runs)


def _numbers(inputs: Sequence[TokenInputs]) -> mx.array | None:
    """The number of the run that each token of a call is in, ``[1, tokens]``, or 0.

    None if there is none.
    """
    if not any(each.together for each in inputs):
        return None
    numbers = np.zeros((1, sum(each.tokens for each in inputs)), np.int32)
    start = count = 0
    for each in inputs:
        for run in each.together:
            count += 1
            numbers[0, start + run.start : start + run.stop] = count
        start += each.tokens
    return mx.array(numbers)
