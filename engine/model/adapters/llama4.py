"""llama4: chunked attention, and queries scaled by position in layers without rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama4

from chairlift.engine.model.adapters.rows import has_rows


def attend(layer: Any, x: mx.array, mask: Any, cache: Any, module: Any) -> mx.array:
    """Attention that scales queries by each row's own positions.

    Args:
        layer: of mlx-lm's class, or mlx-vlm's.
        x: ``[rows, length, hidden]``, as the result.
        module: the module of the layer's class, where ``engine.model.attention`` replaces what
            computes attention.
    """
    rows, length, _ = x.shape

    def heads(projected: mx.array) -> mx.array:
        return projected.reshape(rows, length, -1, layer.head_dim).swapaxes(1, 2)

    # The model counts positions from 1.
    positions = cache.offset[:, None] + mx.arange(1, length + 1)
    scale = mx.log(mx.floor(positions / layer.floor_scale) + 1) * layer.attn_scale + 1
    queries = heads(layer.q_proj(x))
    queries = (queries * scale[:, None, :, None]).astype(queries.dtype)
    keys, values = cache.update_and_fetch(heads(layer.k_proj(x)), heads(layer.v_proj(x)))
    mixed = module.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=layer.scale, mask=mask
    )
    output: mx.array = layer.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))
    return output


class RowAttention(llama4.Attention):  # type: ignore[misc]
    """Attention that scales queries by each row's own positions."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """From ``[rows, length, hidden]`` to the same shape."""
        if self.attn_temperature_tuning and not self.use_rope and has_rows(cache):
            return attend(self, x, mask, cache, llama4)
        original: mx.array = super().__call__(x, mask, cache)
        return original


class RowModel(llama4.LlamaModel):  # type: ignore[misc]
    """A model that takes each layer's mask from the layer's cache."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if cache is None or not has_rows(cache[0]):
            original: mx.array = super().__call__(inputs, cache)
            return original
        h = self.embed_tokens(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, layer_cache.make_mask(inputs.shape[1]), cache=layer_cache)
        normed: mx.array = self.norm(h)
        return normed


BATCHED = {llama4.Attention: RowAttention, llama4.LlamaModel: RowModel}
