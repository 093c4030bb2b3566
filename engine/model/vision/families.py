"""The types of models whose images are supported, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a type are called.

    Attributes:
        axes: the numbers that make the position of a token: 0 if it is the token's place in the
            sequence, 3 for M-RoPE (time, height, width).
    """

    axes: int = 0


_PLAIN = Family()
_MROPE = Family(axes=3)

FAMILIES = {
    "gemma3": _PLAIN,
    "idefics3": _PLAIN,
    "llava": _PLAIN,
    "pixtral": _PLAIN,
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "smolvlm": _PLAIN,
}


# What stands for an image in a text before the processor has run, where that is not the
# processor's ``image_token``.
MARKS = {"gemma3": "<start_of_image>"}
# Processors that cannot be told to add no special tokens to a text.
ADDS_TOKENS = frozenset({"llava"})


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
