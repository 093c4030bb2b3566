"""Adapters that make single-sequence model files of mlx-lm work with batches, or with pages.

Each module adapts the model file of the same name. Most subclass the layers that assume one
position for all rows, and give each row its own position; ``gemma2`` leaves its attention to the
kernels over pages and to the graphs of the host. With caches that are not the engine's, the
inherited method runs.
"""

from __future__ import annotations

import importlib
from typing import Any

ADAPTED = (
    *("afm7", "deepseek_v41", "gemma2", "gemma4_text", "gpt_bigcode", "llama4"),
    *("minimax_m3_vl", "recurrent_gemma"),
)


def adapt(model: Any) -> None:
    """Replaces the classes of the layers of ``model`` that need an adapter.

    Changes only this instance, and no parameters. Call it before ``cache.kinds.make_batch``, which
    relies on it for the model files that are adapted here.
    """
    for part in model.modules():
        package, _, name = type(part).__module__.rpartition(".")
        if package == "mlx_lm.models" and name in ADAPTED:
            batched: dict[type, type] = importlib.import_module(f"{__name__}.{name}").BATCHED
            part.__class__ = batched.get(type(part), type(part))
