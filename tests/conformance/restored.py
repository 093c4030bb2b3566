"""Takes back what an acceleration replaces in modules that several model files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import mlx_lm.models.gated_delta
import mlx_lm.models.ssm
import mlx_vlm.models.gated_delta
import mlx_vlm.models.qwen3_5.gated_delta
import mlx_vlm.models.ssm

_MODULES: list[ModuleType] = [
    mlx_lm.models.gated_delta,
    mlx_lm.models.ssm,
    mlx_vlm.models.gated_delta,
    mlx_vlm.models.ssm,
    mlx_vlm.models.qwen3_5.gated_delta,
]


@contextmanager
def restored() -> Iterator[None]:
    """The next model file is compared with mlx-lm's own functions again."""
    before = [dict(vars(module)) for module in _MODULES]
    try:
        yield
    finally:
        for module, names in zip(_MODULES, before, strict=True):
            vars(module).update(names)
