"""How the processors of the supported types are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.engine.model.vision.adapters.overviews import add_overviews


@dataclass(frozen=True, slots=True)
class Processing:
    """How the processor of a type is called.

    Attributes:
        mark: what stands for an image in a text before the processor has run; None: the processor's
            ``image_token``. In it, "{}" is the image's number, from 1 on.
        pattern: a regular expression of all that the processor takes for an image; None: the mark.
        other_mark: what the processor would take for an image, too.
        settings: further arguments. Without ``add_special_tokens`` the processor has no such
            parameter.
        most: images in a prompt; None: any number. With more, mlx-vlm's code fails or confuses
            them.
        completes: adds to mlx-vlm's processor what it leaves out.
    """

    mark: str | None = None
    other_mark: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: {"add_special_tokens": False})
    pattern: str | None = None
    most: int | None = None
    completes: Callable[[Any], None] | None = None


_INTERNVL = {"add_special_tokens": False, "truncation": False}
_PROCESSING = {
    "gemma3": Processing(mark="<start_of_image>"),
    "granite4_vision": Processing(settings={}, most=1),
    "inkling": Processing(settings={}),
    "internvl": Processing("<IMG_CONTEXT>", "<image>", _INTERNVL),
    "internvl_chat": Processing("<image>", "<IMG_CONTEXT>", _INTERNVL),
    "kimi_k25": Processing(settings={}),
    "kimi_k3": Processing("<|kimi_image_placeholder|>", "<|media_pad|>"),
    "llama4": Processing(completes=add_overviews),
    "llava": Processing(settings={}),
    "llava_onevision": Processing(settings={}),
    "locateanything": Processing("<image-{}>", settings={}, pattern=r"<image-\d+>"),
    "paddleocr_vl": Processing(settings={}, most=1),
    "paligemma": Processing(most=1),
    "step3p7": Processing(most=1),
}


def processing_of(model_type: str) -> Processing:
    """How the processor of models of this type is called."""
    return _PROCESSING.get(model_type) or Processing()
