"""gemma4_text: layers without keys of their own get the cache whose keys they read.

So a packed step shows them the columns of each batch, and all layers rotate by the same positions.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma4_text

# ``engine.model.attention`` replaces it here, too.
from mlx_lm.models.gemma4_text import scaled_dot_product_attention

from chairlift.engine.model.adapters.rows import has_rows


class RowAttention(gemma4_text.Attention):  # type: ignore[misc]
    """Attention that reads another layer's keys from the cache, if it has none of its own."""

    def __call__(
        self,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        shared_kv: Any = None,
        offset: Any = None,
    ) -> tuple[mx.array, Any, Any]:
        """From ``[rows, length, hidden]`` to the same shape.

        Returns:
            Also the keys and values, and their offset; None with caches that keep them.
        """
        if not has_rows(cache):
            given = x, mask, cache, shared_kv, offset
            original: tuple[mx.array, Any, Any] = super().__call__(*given)
            return original
        rows, length, _ = x.shape

        def heads(projected: mx.array) -> mx.array:
            return projected.reshape(rows, length, -1, self.head_dim)

        queries = self.q_norm(heads(self.q_proj(x))).swapaxes(1, 2)
        queries = self.rope(queries, offset=cache.offset)
        if self.has_kv:
            keys = heads(self.k_proj(x))
            values = self.v_norm(keys if self.use_k_eq_v else heads(self.v_proj(x)))
            keys = self.rope(self.k_norm(keys).swapaxes(1, 2), offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values.swapaxes(1, 2))
        else:
            keys, values = cache.keys_and_values()
        mixed = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1)), None, None


class RowModel(gemma4_text.Gemma4TextModel):  # type: ignore[misc]
    """A model that passes to each layer the cache that it reads."""

    def __call__(self, inputs: Any = None, cache: Any = None, **more: Any) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if cache is not None and has_rows(cache[0]):
            cache = [cache[source] for source in self.previous_kvs]
        hidden: mx.array = super().__call__(inputs, cache=cache, **more)
        return hidden


BATCHED = {gemma4_text.Attention: RowAttention, gemma4_text.Gemma4TextModel: RowModel}
