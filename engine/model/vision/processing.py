"""How the processors of the supported types are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Processing:
    """How the processor of a type is called.

    Attributes:
        mark: what stands for an image in a text before the processor has run; None: the processor's
            ``image_token``.
        other_mark: what the processor would take for an image, too.
        settings: further arguments. Without ``add_special_tokens`` the processor has no such
            parameter.
        prepared: mlx-vlm's ``prepare_inputs`` calls the processor, instead of its ``__call__``.
        most: how many images of a prompt mlx-vlm's code takes; None: any number.
        token: the token of which an image has one for each of its embeddings; None: the config
            has its id.
        config_token: the name of that id in mlx-vlm's config; None: one that many types have.
        arrays: what it returns that makes an image's embeddings; None: all but what is the text's.
        numbering: the array that numbers tokens of the prompt.
        records: it returns an image as a record of DeepSeek's.
    """

    mark: str | None = None
    other_mark: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: {"add_special_tokens": False})
    prepared: bool = False
    most: int | None = None
    token: str | None = None
    config_token: str | None = None
    arrays: frozenset[str] | None = None
    numbering: str | None = None
    records: bool = False


_INTERNVL = {"add_special_tokens": False, "truncation": False}
_LLAVA_NEXT = Processing(settings={}, prepared=True, most=1)
# One negative token stands for an image; the number of its embeddings is the model's.
_LLAVA_QWEN = Processing(
    "<image>", settings={}, prepared=True, most=1, config_token="image_token_index"
)
_PROCESSING = {
    "deepseek_v41": Processing(
        "<\uff5cdeepseek_image\uff5c>",
        settings={},
        prepared=True,
        config_token="image_token_id",
        records=True,
    ),
    "fastvlm": _LLAVA_QWEN,
    "gemma3": Processing(mark="<start_of_image>"),
    "hunyuan_vl": Processing(
        settings={}, prepared=True, most=1, arrays=frozenset({"pixel_values", "image_grid_thw"})
    ),
    "internvl": Processing("<IMG_CONTEXT>", "<image>", _INTERNVL),
    "internvl_chat": Processing("<image>", "<IMG_CONTEXT>", _INTERNVL),
    "granite_vision": _LLAVA_NEXT,
    "jina_vlm": Processing(
        settings={}, prepared=True, most=1, token="<im_patch>", numbering="image_input_idx"
    ),
    "llava": Processing(settings={}),
    "llava_bunny": _LLAVA_QWEN,
    "llava_next": _LLAVA_NEXT,
    "mimo_v2": Processing(config_token="image_token_id"),
    "multi_modality": _LLAVA_QWEN,
}


def processing_of(model_type: str) -> Processing:
    """How the processor of models of this type is called."""
    return _PROCESSING.get(model_type) or Processing()
