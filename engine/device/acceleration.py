"""What this device does sooner than mlx-lm's model files would, chosen when a model is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

from chairlift.cache.kinds import PLAIN, Layers
from chairlift.engine.cpu import decode_attention as host_attention
from chairlift.engine.cpu import kernels
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda.layer import CudaLayer, CudaPrompt
from chairlift.engine.cuda.selftest import kernels_work
from chairlift.engine.device import profile
from chairlift.engine.model import attention


class Acceleration(NamedTuple):
    """Whether the model is eager now (``engine.cpu.kernels``), and the layers of its caches."""

    eager: bool
    layers: Layers = PLAIN


def accelerate(model: Any, exactly: bool = True) -> Acceleration:
    """Gives a model this device's own attention and activations, where there are some.

    Args:
        exactly: no weight may be rounded; see ``engine.cpu.bf16_linear``.
    """
    if profile.current().on_cpu:
        eager = kernels.install(model, exactly)
        host_attention.install(model)
        return Acceleration(eager)
    if not kernels_work():
        attention.install(model)
        return Acceleration(False)
    attention.install(model, cuda_attention.attend)
    cuda_block.install(model)
    return Acceleration(False, Layers(CudaLayer, CudaPrompt))
