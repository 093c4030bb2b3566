"""gemma4_text: layers without keys of their own get the cache whose keys they read.

So a packed step shows them the columns of each batch, and all layers rotate by the same positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma4_text

from chairlift.engine.model.adapters.rows import has_rows


def attend(layer: Any, x: mx.array, mask: Any, cache: Any, module: Any, reads: bool) -> mx.array:
    """Attention to a cache.

    Args:
        layer: of mlx-lm's class, or mlx-vlm's.
        x: ``[rows, length, hidden]``, as the result.
        module: the module of the layer's class, where ``engine.model.attention`` replaces what
            computes attention.
        reads: the layer has no keys and values; another has written them to the cache.
    """
    rows, length, _ = x.shape

    def heads(projected: mx.array) -> mx.array:
        return projected.reshape(rows, length, -1, layer.head_dim)

    queries = layer.q_norm(heads(layer.q_proj(x))).swapaxes(1, 2)
    queries = layer.rope(queries, offset=cache.offset)
    if reads:
        keys, values = cache.keys_and_values()
    else:
        keys = heads(layer.k_proj(x))
        values = layer.v_norm(keys if layer.use_k_eq_v else heads(layer.v_proj(x)))
        keys = layer.rope(layer.k_norm(keys).swapaxes(1, 2), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values.swapaxes(1, 2))
    mixed = module.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=layer.scale, mask=mask
    )
    output: mx.array = layer.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))
    return output


def read_by(cache: Any, sources: Sequence[int]) -> Any:
    """The cache that each layer reads; other caches than the engine's as they are.

    Args:
        cache: those of the layers that have keys.
        sources: the layer whose keys each layer reads.
    """
    is_own = cache is not None and has_rows(cache[0])
    return [cache[source] for source in sources] if is_own else cache


class RowAttention(gemma4_text.Attention):  # type: ignore[misc]
    """Attention that reads another layer's keys from the cache, if it has none of its own."""

    original_class = gemma4_text.Attention

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
        if has_rows(cache):
            return attend(self, x, mask, cache, gemma4_text, not self.has_kv), None, None
        given = x, mask, cache, shared_kv, offset
        original: tuple[mx.array, Any, Any] = super().__call__(*given)
        return original


class RowModel(gemma4_text.Gemma4TextModel):  # type: ignore[misc]
    """A model that passes to each layer the cache that it reads."""

    def __call__(self, inputs: Any = None, cache: Any = None, **more: Any) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        cache = read_by(cache, self.previous_kvs)
        hidden: mx.array = super().__call__(inputs, cache=cache, **more)
        return hidden


BATCHED = {gemma4_text.Attention: RowAttention, gemma4_text.Gemma4TextModel: RowModel}
