"""Adapters that make single-sequence code of mlx-vlm work with batches, as ``model.adapters``.

Each module adapts the language model of the package of the same name.
"""

from __future__ import annotations

import importlib
from typing import Any

ADAPTED = (
    "deepseek_v41",
    "gemma4",
    "glm5_next",
    "hunyuan_vl",
    "inkling",
    "jina_vlm",
    "llama4",
    "minimax_m3_vl",
    "qwen4_exp",
    "unlimited_ocr",
)


def adapt(language_model: Any) -> None:
    """Replaces the classes of those parts of a language model that need an adapter."""
    name = type(language_model).__module__.split(".")[-2]
    if name not in ADAPTED:
        return
    batched: dict[type, type] = importlib.import_module(f"{__name__}.{name}").batched()
    for part in language_model.modules():
        if type(part) in batched:
            part.__class__ = batched[type(part)]
