"""Factors that model files of mlx-lm multiply into a checkpoint's weights when they load it.

PEFT trains adapters of the checkpoint's weights, so that their products need the same factors.
mlx-lm trains adapters of the loaded weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from chairlift.engine.lora.low_rank import dimensions

_FOLDING = "mlx_lm.models.falcon_h1"
# By the shape of this weight, the model file tells a checkpoint's weights from loaded ones.
_CONVOLUTION = "model.layers.0.mamba.conv1d.weight"


def folded_factors(model: Any, layers: Mapping[str, Any]) -> dict[str, mx.array]:
    """The factor of each output of linear layers, ``[outputs]``; those without any are left out."""
    if all(base.__module__ != _FOLDING for base in type(model).__mro__):
        return {}
    ones = {f"{name}.weight": mx.ones((dimensions(each)[1], 1)) for name, each in layers.items()}
    folded = model.sanitize({**ones, _CONVOLUTION: mx.ones((1, 1, 2))})
    return {name: folded[f"{name}.weight"][:, 0] for name in layers}
