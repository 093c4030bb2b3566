"""Model files that take a single sequence for granted, made to work with rows.

Each module here is of one of mlx-lm's model files, by its name: subclasses of what has one position
for all rows, with positions of each row's own. They do so with our caches only; with any other the
inherited method runs.
"""

from __future__ import annotations

import importlib
from typing import Any

ADAPTED = ("afm7", "deepseek_v41", "gpt_bigcode", "llama4", "minimax_m3_vl", "recurrent_gemma")


def adapt(model: Any) -> None:
    """Gives the parts of ``model`` that need it the class that can do rows; once is enough.

    Only this instance changes, and nothing of its parameters. To be called before a batch is made
    (``cache.kinds.make_batch``): of a model file that is adapted here, that is not checked there.
    """
    package, _, name = type(model).__module__.rpartition(".")
    if package != "mlx_lm.models" or name not in ADAPTED:
        return
    batched: dict[type, type] = importlib.import_module(f"{__name__}.{name}").BATCHED
    for part in model.modules():
        if type(part) in batched:
            part.__class__ = batched[type(part)]
