"""Replaces what the layers of a model call."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.engine.model.layers import decayed, depthwise, gated_delta, head_products
from chairlift.engine.model.layers.gated_delta import Kernel


def install(model: Any, kernel: Kernel | None = None) -> None:
    """Replaces all of them; on Metal not those for which mlx-lm has kernels.

    Args:
        kernel: computes the gated delta rule of what it takes.
    """
    head_products.install(model)
    if not mx.metal.is_available():
        depthwise.install(model)
        gated_delta.install(model, kernel)
        decayed.install(model)
