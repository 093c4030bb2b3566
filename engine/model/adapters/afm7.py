"""afm7: layers that reuse another layer's keys get its cache, and so the positions of each row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import afm7

from chairlift.engine.model.adapters.rows import has_rows


class RowReuseAttention(afm7.KVReuseAttention):  # type: ignore[misc]
    """Attention that reads keys and values from a cache, if it gets one."""

    def __call__(
        self, x: mx.array, keys: Any, values: Any, mask: Any = None, cache: Any = None
    ) -> mx.array:
        """From ``[rows, length, hidden]`` to the same shape."""
        if cache is None:
            original: mx.array = super().__call__(x, keys, values, mask)
            return original
        rows, length, _ = x.shape
        queries = self.q_proj(x).reshape(rows, length, self.n_heads, -1).swapaxes(1, 2)
        queries = self.q_norm(self.rope(queries, offset=cache.offset))
        keys, values = cache.keys_and_values()
        # Looked up in the module, where ``engine.model.attention`` replaces it.
        mixed = afm7.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        output: mx.array = self.out_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return output


class RowReuseBlock(afm7.KVReuseTransformerBlock):  # type: ignore[misc]
    """A block that passes the cache to its attention."""

    def __call__(
        self, x: mx.array, keys: Any, values: Any, mask: Any = None, cache: Any = None
    ) -> mx.array:
        """From ``[rows, length, hidden]`` to the same shape."""
        h = x + self.self_attn(self.input_layernorm(x), keys, values, mask, cache)
        output: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return output


class RowModel(afm7.AFMModel):  # type: ignore[misc]
    """A model that passes its last cache to the layers that reuse its keys."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if cache is None or not has_rows(cache[-1]):
            original: mx.array = super().__call__(inputs, cache)
            return original
        h = self.embedding(inputs)
        mask = cache[-1].make_mask(inputs.shape[1])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=layer_cache)
        for layer in self.kv_reuse_layers:
            h = layer(h, None, None, mask, cache[-1])
        normed: mx.array = self.output_norm(h)
        return normed


BATCHED = {
    afm7.AFMModel: RowModel,
    afm7.KVReuseAttention: RowReuseAttention,
    afm7.KVReuseTransformerBlock: RowReuseBlock,
}
