"""glm5_next: each row's queries choose among the groups of keys that are complete in that row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from chairlift.engine.model.adapters.rows import has_rows
from chairlift.engine.model.vision.adapters.pooled import PooledLayer


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.glm5_next import language

    return {
        language.Glm5NextIndexer: _indexer(language),
        language.Glm5NextAttention: _attention(language),
        language.LanguageModel: _language_model(language),
    }


def _indexer(language: Any) -> type:
    class RowIndexer(language.Glm5NextIndexer):  # type: ignore[misc]
        """Chooses the tokens that each query of a row reads."""

        def chosen(self, x: mx.array, q_residual: mx.array, layer: PooledLayer) -> mx.array:
            """Columns ``[rows, length, some]``, -1 for none.

            Args:
                x, q_residual: ``[rows, length, ...]``.
                layer: has the keys of groups of tokens.
            """
            rows, length, _ = x.shape
            size, start = self.index_kpool, layer.entries.offset
            keys, gates = self._project_keys(x)
            pools = layer.update_and_fetch(keys, gates.astype(keys.dtype), self._pool)
            queries, weights = self._project_queries(x, q_residual)
            scores = language._score_index_keys(queries, pools, weights, self.softmax_scale)
            positions = start[:, None] + mx.arange(length)
            complete = ((positions + 1) // size)[..., None]
            scores = mx.where(mx.arange(pools.shape[1]) < complete, scores, -mx.inf)
            count = min(self.index_topk // size, pools.shape[1])
            best = mx.argpartition(-scores, count - 1, axis=-1)[..., :count].astype(mx.int32)
            columns = best[..., None] * size + mx.arange(size)
            columns = mx.where((best < complete)[..., None], columns, -1).reshape(rows, length, -1)
            if not self.always_select_tail:
                return columns
            tail = complete * size + mx.arange(size - 1)
            tail = mx.where(tail <= positions[..., None], tail, -1)
            return mx.concatenate([columns, tail.astype(mx.int32)], axis=-1)

        def _pool(self, keys: mx.array, gates: mx.array, numbers: mx.array) -> Any:
            """The keys of groups; their numbers do not matter, because keys have no positions."""
            rows, groups, size, _ = keys.shape
            flat = (each.reshape(rows, groups * size, -1) for each in (keys, gates))
            return self._compress_pools(*flat)

    return RowIndexer


def _attention(language: Any) -> type:
    class RowAttention(language.Glm5NextAttention):  # type: ignore[misc]
        """Attention of rows to the chosen tokens."""

        def __call__(
            self,
            x: mx.array,
            padding_mask: Any = None,
            cache: Any = None,
            prev_topk_indices: Any = None,
            last_only: bool = False,
        ) -> Any:
            latents = cache[0] if hasattr(cache, "caches") else cache
            if not has_rows(latents):
                return super().__call__(x, padding_mask, cache, prev_topk_indices, last_only)
            rows, length, _ = x.shape
            q, kv = mx.split(self.qkv_a_proj(x), [self.q_lora_rank], axis=-1)
            q_residual = self.q_a_layernorm(q)
            queries = self.q_b_proj(q_residual).reshape(rows, length, self.num_heads, -1)
            new = self.kv_a_layernorm(kv)[:, None]
            nothing = mx.zeros((rows, 1, length, 0), new.dtype)
            latent, _ = latents.update_and_fetch(new, nothing)
            chosen = prev_topk_indices
            if self.indexer is not None:
                pooled = PooledLayer(cache[1], cache[2], self.indexer.index_kpool)
                chosen = self.indexer.chosen(x, q_residual, pooled)
            # With full attention, a row's tokens are in the columns of their positions.
            mixed, chosen = self._attend(
                queries.swapaxes(1, 2), latent, new, chosen, None, None, last_only
            )
            return self.o_proj(mixed), chosen

    return RowAttention


def _language_model(language: Any) -> type:
    class RowLanguageModel(language.LanguageModel):  # type: ignore[misc]
        """A language model with caches of rows."""

        def make_row_caches(self) -> list[Any]:
            """The caches of its layers: states; or latents, and two for an indexer's groups."""
            return [
                ArraysCache(2) if layer.is_linear else _attention_caches(layer.self_attn)
                for layer in self.layers
            ]

    return RowLanguageModel


def _attention_caches(attention: Any) -> Any:
    if attention.indexer is None:
        return KVCache()
    return CacheList(KVCache(), KVCache(), RotatingKVCache(attention.indexer.index_kpool))
