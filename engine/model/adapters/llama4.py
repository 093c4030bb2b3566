"""llama4: chunked attention, and queries scaled by position in layers without rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama4

from chairlift.engine.model.adapters.rows import has_rows


class RowAttention(llama4.Attention):  # type: ignore[misc]
    """Attention that scales queries by each row's own positions."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """From ``[rows, length, hidden]`` to the same shape."""
        scaled = self.attn_temperature_tuning and not self.use_rope
        if not scaled or not has_rows(cache):
            original: mx.array = super().__call__(x, mask, cache)
            return original
        rows, length, _ = x.shape

        def heads(projected: mx.array) -> mx.array:
            return projected.reshape(rows, length, -1, self.head_dim).swapaxes(1, 2)

        # The model counts positions from 1.
        positions = cache.offset[:, None] + mx.arange(1, length + 1)
        scale = mx.log(mx.floor(positions / self.floor_scale) + 1) * self.attn_scale + 1
        queries = heads(self.q_proj(x))
        queries = (queries * scale[:, None, :, None]).astype(queries.dtype)
        keys, values = cache.update_and_fetch(heads(self.k_proj(x)), heads(self.v_proj(x)))
        # Looked up in the module, where ``engine.model.attention`` replaces it.
        mixed = llama4.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        output: mx.array = self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return output


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
