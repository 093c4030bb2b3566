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
