"""Replaces what the recurrent layers of a model call."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.engine.model.recurrent import decayed, depthwise, gated_delta
from chairlift.engine.model.recurrent.gated_delta import Kernel


def install(model: Any, kernel: Kernel | None = None) -> None:
    """Replaces all of them, unless MLX has Metal, for which mlx-lm has kernels.

    Args:
        kernel: computes the gated delta rule of what it takes.
    """
    if not mx.metal.is_available():
        depthwise.install(model)
        gated_delta.install(model, kernel)
        decayed.install(model)
