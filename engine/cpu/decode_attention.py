"""Computes an attention layer's decode step in NumPy, from its input to its output.

In a small model rotary embedding, attention and a dozen small operations of MLX take as long as the
matrix products between them. A layer is replaced only if a trial shows that the replacement
computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.layer import Mask
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer, attend_on_host
from chairlift.engine.cpu import decoder_layer
from chairlift.engine.cpu.attention import attended
from chairlift.engine.cpu.compiled import row_attention
from chairlift.engine.cpu.decoder_layer import DecodeCache, DecodeMask
from chairlift.engine.cpu.elementwise import Norm
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.host_linear import HostLinear, Products
from chairlift.engine.cpu.kernels import SharedRope
from chairlift.engine.cpu.matrix import apart
from chairlift.engine.cpu.views import view
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_TRIAL = Trial(elementwise(1e-3), log, error="an attention layer is of another form: %s")


class HostAttention:
    """An attention layer's decode step.

    Args:
        layer: its projections have host products, those of queries, keys and values in one group.
            The projections may have biases, and each head's queries and keys a norm.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._products: Products = layer.q_proj.products
        self._output: Products = layer.o_proj.products
        self._dim: int = layer.rope.dims
        self._norms = [Norm(layer[name], self._dim) for name in _NORMS if name in layer]
        projections = [layer[name] for name in _PROJECTIONS]
        biases = [
            view(each.bias) if "bias" in each else np.zeros(len(each.weight), np.float32)
            for each in projections
        ]
        self._bias = np.concatenate(biases[:3]) if any(map(np.any, biases[:3])) else None
        self._output_bias = biases[3] if biases[3].any() else None

    def __call__(self, x: Floats, mask: DecodeMask, cache: DecodeCache) -> Floats:
        """See ``HostDecode``."""
        rows, dim = len(x), self._dim
        product = self._products(x)
        if self._bias is not None:
            product += self._bias
        queries, _, values = apart(product, self._products.matrix.stops)
        heads, key_heads = queries.shape[1] // dim, values.shape[1] // dim
        queries_keys = product[:, : (heads + key_heads) * dim].reshape(rows, -1, dim)
        if self._norms:
            split = queries_keys[:, :heads], queries_keys[:, heads:]
            normed = [norm(part) for norm, part in zip(self._norms, split, strict=True)]
            queries_keys = np.concatenate(normed, axis=1)
        rotated = self._layer.rope.rotate(queries_keys, cache.offset)
        arrays = rotated[:, :heads], rotated[:, heads:], values.reshape(rows, key_heads, dim)
        if isinstance(cache, PackedLayer):
            assert isinstance(mask, PackedMask)
            mixed = cache.attend_on_host(*arrays, mask, self)
        else:
            assert not isinstance(mask, PackedMask)
            mixed = attend_on_host(cache, *arrays, mask, self)
        result = self._output(mixed.reshape(rows, -1))
        if self._output_bias is not None:
            result += self._output_bias
        return result

    def by_row(
        self,
        queries: Floats,
        keys: mx.array,
        values: mx.array,
        counts: Sequence[int],
        begun: Sequence[int],
    ) -> Floats | None:
        """See ``HostAttend``."""
        stored = view(keys), view(values)
        if not row_attention.supports(queries, *stored):
            return None
        return row_attention.attend(queries, *stored, counts, begun, self._layer.scale)

    def masked(self, queries: Floats, keys: mx.array, values: mx.array, mask: Mask) -> Floats:
        """See ``HostAttend``."""
        rows, heads, step, dim = queries.shape
        mx.eval(keys, values, mask if isinstance(mask, mx.array) else [])
        grouped = queries.reshape(rows, keys.shape[1], -1, dim)
        mixed = attended(grouped, keys, values, mask, step, self._layer.scale)
        return mixed.reshape(rows, heads, step, -1)


def install(model: Any) -> None:
    """Replaces the attention layers that have Llama's, Qwen's or Gemma's form, and host products,
    and the decoder layers around them.
    """
    layers = list(model.modules())
    count = sum(map(_replace, layers))
    if count:
        whole = decoder_layer.install(layers)
        log.info("decode on the host: %d attention layers, %d decoder layers", count, whole)


def _replace(layer: Any) -> bool:
    children = layer.children()
    if not {*_PROJECTIONS, "rope"} <= set(children) <= {*_PROJECTIONS, *_NORMS, "rope"}:
        return False
    projections = [children[name] for name in _PROJECTIONS]
    if type(layer.rope) is not SharedRope or (_NORMS[0] in children) != (_NORMS[1] in children):
        return False
    if any(not isinstance(part, HostLinear) for part in projections):
        return False
    host = _TRIAL.attempt(lambda: HostAttention(layer))
    if host is None:
        return False
    return decoder_layer.replace(layer, host, _TRIAL)
