"""Replaces slow functions and modules that the layers of a model call."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.model.layers import decayed, depthwise, gated_delta, head_products


class Kernels(NamedTuple):
    """A device's kernels; None where it has none.

    Attributes:
        gated_delta: for the gated delta rule.
        decayed: for state space models and gated linear attention.
    """

    gated_delta: gated_delta.GatedDeltaKernel | None = None
    decayed: decayed.DecayedKernel | None = None


def install(model: Any, kernels: Kernels | None = None) -> bool:
    """Replaces those of this package; on Metal not those for which mlx-lm has kernels.

    Returns:
        Whether any layer may call one of the ``kernels``.
    """
    kernels = kernels or Kernels()
    head_products.install(model)
    if not mx.metal.is_available():
        depthwise.install(model)
        found = gated_delta.install(model, kernels.gated_delta)
        found |= decayed.install(model, kernels.decayed)
        return found and any(kernels)
    return False
