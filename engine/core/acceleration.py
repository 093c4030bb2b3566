"""Replaces parts of a loaded model by the device's faster ones, if there are any."""

from __future__ import annotations

from typing import Any, NamedTuple

from chairlift.cache.pages.kernels import PageKernels
from chairlift.engine.cpu import kernels
from chairlift.engine.cpu.compiled import recurrent_layers
from chairlift.engine.cpu.decoder import install as decoder
from chairlift.engine.cpu.graph import install as graph
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda import experts, narrow_rope, quantized, skinny
from chairlift.engine.cuda import gated_delta as cuda_gated_delta
from chairlift.engine.cuda.paged.kernels import CudaPages
from chairlift.engine.cuda.paged.selftest import kernels_work
from chairlift.engine.device import memory, profile
from chairlift.engine.model import attention
from chairlift.engine.model.layers import install as layers


class Acceleration(NamedTuple):
    """The demands of the accelerated model on the engine.

    Attributes:
        eager: the model computes while its graph is built; see ``engine.cpu.kernels``.
        pages: kernels for paged caches; None: caches are columns.
        half_kv: keys and values in float16 are read as they are; see ``cache.quantized``.
    """

    eager: bool
    pages: PageKernels | None = None
    half_kv: bool = False


def accelerate(model: Any, exactly: bool = True, spare_bytes: int | None = None) -> Acceleration:
    """Replaces a model's attention, activations and blocks by the device's faster ones.

    Args:
        exactly: no weight may be rounded; see ``engine.cpu.host_linear``.
        spare_bytes: memory beside the weights, of which ``engine.cuda.quantized`` takes a part;
            None: all that is free.
    """
    cuda = profile.current().kind == "cuda"
    own = layers.Kernels(cuda_gated_delta.by_kernel, cuda_gated_delta.decayed_by_kernel)
    if profile.current().on_cpu:
        eager = layers.install(model, recurrent_layers.kernels())
        eager |= kernels.install(model, exactly)
        half_kv = decoder.install(model)
        graph.install(model)
        return Acceleration(eager, half_kv=half_kv)
    layers.install(model, own if cuda else None)
    if cuda:
        narrow_rope.install()
        experts.install(model)
    if not kernels_work():
        attention.install(model)
        return Acceleration(False)
    attention.install(model, cuda_attention.attend)
    spare = memory.free_memory() if spare_bytes is None else spare_bytes
    products = cuda_block.install(model)
    quantized.install(model, products, spare)
    skinny.install(model, products)
    return Acceleration(False, CudaPages())
