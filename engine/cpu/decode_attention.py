"""Computes an attention layer's decode step in NumPy, from its input to its output.

In a small model rotary embedding, attention and a dozen small operations of MLX take as long as the
matrix products between them. A layer is replaced only if a trial shows that the replacement
computes the same.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.cpu.attention import attended
from chairlift.engine.cpu.host_linear import HostLinear, is_small_batch
from chairlift.engine.cpu.kernels import SharedRope
from chairlift.engine.cpu.matrix import apart
from chairlift.engine.cpu.views import view
from chairlift.engine.model.trial import Trial, elementwise

log = logging.getLogger(__name__)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_TRIAL = Trial(elementwise(1e-3), log, error="an attention layer is of another form: %s")


def install(model: Any) -> None:
    """Replaces the attention layers that have Llama's form, and host products."""
    count = sum(_replace(layer) for layer in model.modules())
    if count:
        log.info("decode attention on the host: %d layers", count)


def _replace(layer: Any) -> bool:
    children = layer.children()
    if set(children) != {*_PROJECTIONS, "rope"} or type(layer.rope) is not SharedRope:
        return False
    projections = [children[name] for name in _PROJECTIONS]
    if any(not isinstance(part, HostLinear) or "bias" in part for part in projections):
        return False
    base: Any = type(layer)

    def decode(
        self: Any, x: mx.array, mask: Any = None, cache: Any = None, **more: Any
    ) -> mx.array:
        supported = type(cache) is LayerCache and not more and x.shape[1] == 1 and is_small_batch(x)
        result: mx.array = (
            _decode(self, x, mask, cache)
            if supported
            else base.__call__(self, x, mask, cache, **more)
        )
        return result

    if not _decodes_alike(layer, decode):
        return False
    layer.__class__ = type(base.__name__, (base,), {"__call__": decode})
    return True


def _decode(layer: Any, x: mx.array, mask: mx.array | None, cache: LayerCache) -> mx.array:
    rows, _, width = x.shape
    dim = layer.rope.dims
    products = layer.q_proj.products
    product = products(view(x).reshape(rows, width))
    queries, _, values = apart(product, products.matrix.stops)
    heads, key_heads = queries.shape[1] // dim, values.shape[1] // dim
    queries_keys = product[:, : (heads + key_heads) * dim].reshape(rows, -1, dim)
    rotated = layer.rope.rotate(queries_keys, cache.offset)
    new = rotated[:, heads:, None], values.reshape(rows, key_heads, 1, dim)
    seen = cache.write_on_host(*new)
    if seen is None:
        seen = cache.update_and_fetch(*map(mx.array, new))
    mx.eval(seen, [] if mask is None else mask)
    grouped = rotated[:, :heads].reshape(rows, key_heads, -1, dim)
    mixed = attended(grouped, *seen, mask, 1, layer.scale)
    result: mx.array = mx.array(layer.o_proj.products(mixed.reshape(rows, -1)))
    return result[:, None]


def _decodes_alike(layer: Any, decode: Any) -> bool:
    """Whether ``decode`` and the layer itself give the same in a decode step after three tokens."""
    inputs = layer.q_proj.weight.shape[1]
    prompt, token = (mx.random.normal((2, n, inputs), key=mx.random.key(n)) for n in (3, 1))

    def step_by(call: Any) -> mx.array:
        batch = BatchCache([LayerKind(None)])
        cache = batch.layers[0]
        for _ in range(2):
            batch.join(columns=4)
        with batch.step(3):
            mx.eval(type(layer).__call__(layer, prompt, cache.make_mask(3), cache))
        with batch.step(1):
            result: mx.array = call(layer, token, cache.make_mask(1), cache)
            mx.eval(result)
        return result

    return _TRIAL.passes(lambda: step_by(type(layer).__call__), lambda: step_by(decode))
