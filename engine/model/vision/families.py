"""The types of models whose images are supported, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a type are called.

    Attributes:
        axes: the numbers that make the position of a token: 0 if it is the token's place in the
            sequence, 3 for M-RoPE (time, height, width).
        deepstack: images also add embeddings after each of the first layers.
    """

    axes: int = 0
    deepstack: bool = False


_PLAIN = Family()
_MROPE = Family(axes=3)
_DEEPSTACK = Family(axes=3, deepstack=True)

FAMILIES = {
    "gemma3": _PLAIN,
    "idefics3": _PLAIN,
    "internvl": _PLAIN,
    "internvl_chat": _PLAIN,
    "llava": _PLAIN,
    "mistral3": _PLAIN,
    "pixtral": _PLAIN,
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
    "smolvlm": _PLAIN,
}


@dataclass(frozen=True, slots=True)
class Processing:
    """How the processor of a type is called.

    Attributes:
        mark: what stands for an image in a text before the processor has run; None: the processor's
            ``image_token``.
        other_mark: what the processor would take for an image, too.
        settings: further arguments. Without ``add_special_tokens`` the processor adds some to each
            text.
    """

    mark: str | None = None
    other_mark: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: {"add_special_tokens": False})


_INTERNVL = {"add_special_tokens": False, "truncation": False}
_PROCESSING = {
    "gemma3": Processing(mark="<start_of_image>"),
    "internvl": Processing("<IMG_CONTEXT>", "<image>", _INTERNVL),
    "internvl_chat": Processing("<image>", "<IMG_CONTEXT>", _INTERNVL),
    "llava": Processing(settings={}),
}


def processing_of(model_type: str) -> Processing:
    """How the processor of models of this type is called."""
    return _PROCESSING.get(model_type) or Processing()


def vision_type(config: Mapping[str, Any]) -> str | None:
    """The type of a model that sees, by its config.json; None for all others.

    It is the name of a module of ``mlx_vlm.models``, which may not be installed.
    """
    model_type = config.get("model_type")
    # A model with a file of its own code is mlx-lm's.
    sees = model_type in FAMILIES and "vision_config" in config and "model_file" not in config
    return str(model_type) if sees else None


def is_installed() -> bool:
    """Whether the extra "vision" is installed."""
    return find_spec("mlx_vlm") is not None


def family_of(model_type: str) -> Family:
    """How models of this type are called; KeyError if their images are not supported."""
    return FAMILIES[model_type]
