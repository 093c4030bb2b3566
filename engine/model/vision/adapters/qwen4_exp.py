"""qwen4_exp: blocks of keys are chosen for each row, by the row's own positions.

The indexer keeps a key for each token, and the key's M-RoPE positions in place of a value: the key
of a block is rotated by the positions of its first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from chairlift.cache.state import StateLayer
from chairlift.engine.model.vision.adapters.indexed import IndexedLayer, with_indexers

# The slot of a layer that has embeddings of several tokens.
_LAST_TOKENS = 3


class IndexedRows(IndexedLayer):
    """The cache of a layer with an indexer."""

    def update_indexer(self, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Writes keys ``[rows, length, dim]`` and positions ``[3, rows, length]``.

        Returns:
            Keys ``[rows, columns, dim]`` and positions ``[3, rows, columns]``.
        """
        by_token = mx.moveaxis(positions, 0, -1).astype(mx.float32)
        keys, by_token = self.update_index(keys[:, None], by_token[:, None])
        return keys[:, 0], mx.moveaxis(by_token[:, 0], -1, 0).astype(mx.int32)


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.qwen4_exp import language

    return {
        language.Qwen4ExpNGramEmbedding: _embedding(language),
        language.Qwen4ExpQSAIndexer: _indexer(language),
        language.LanguageModel: _language_model(language),
    }


def _embedding(language: Any) -> type:
    class RowEmbedding(language.Qwen4ExpNGramEmbedding):  # type: ignore[misc]
        """Keeps the last tokens as differences from the end of a text.

        Zeros are then the state before a row's first token. Files of prefixes have floats only.
        """

        def __call__(self, input_ids: mx.array, cache: Any) -> Any:
            if not isinstance(cache, StateLayer):
                return super().__call__(input_ids, cache)
            if (last := cache[_LAST_TOKENS]) is not None:
                cache[_LAST_TOKENS] = last.astype(mx.int64) + self.eos_token_id
            embeddings = super().__call__(input_ids, cache)
            last = cache[_LAST_TOKENS] - self.eos_token_id
            cache[_LAST_TOKENS] = last.astype(mx.float32)
            return embeddings

    return RowEmbedding


def _indexer(language: Any) -> type:
    class RowIndexer(language.Qwen4ExpQSAIndexer):  # type: ignore[misc]
        """Chooses the blocks that each query of a row reads."""

        def select_from_projected(self, qk: mx.array, cache: Any, position_ids: Any) -> Any:
            """Returns block numbers ``[rows, length, some]``, -1 for none, and what they count.

            None if the blocks are too few to choose from.
            """
            if not isinstance(cache, IndexedRows):
                return super().select_from_projected(qk, cache, position_ids)
            rows, length, _ = qk.shape
            heads = qk.reshape(rows, length, self.n_heads + self.kv_heads, self.head_dim)
            keys, positions = cache.update_indexer(heads[:, :, self.n_heads], position_ids)
            blocks = keys.shape[1] // self.compress_ratio
            if blocks <= self.block_topk:
                return None
            queries = self.q_layernorm(heads[:, :, : self.n_heads]).swapaxes(1, 2)
            queries = self._apply_rope(queries, position_ids).astype(mx.float32)
            pooled = self._pooled(keys, positions, blocks).astype(mx.float32)
            scores = mx.maximum(queries @ pooled.swapaxes(-1, -2), 0).sum(axis=1)
            scores = scores / math.sqrt(self.head_dim)
            ends = cache.offset[:, None] + mx.arange(1, length + 1)
            complete = ends // self.compress_ratio
            scores = mx.where(mx.arange(blocks) < complete[..., None], scores, -mx.inf)
            best = mx.argpartition(-scores, self.block_topk - 1, axis=-1)[..., : self.block_topk]
            return SimpleNamespace(
                selected_blocks=mx.where(best < complete[..., None], best.astype(mx.int32), -1),
                query_ends=ends,
                complete_counts=complete,
                left_padding=mx.zeros((rows,), mx.int32),
                key_len=keys.shape[1],
                zero_padding=True,
            )

        def _pooled(self, keys: mx.array, positions: mx.array, blocks: int) -> Any:
            """The keys of complete blocks, ``[rows, 1, blocks, dim]``."""
            tokens = blocks * self.compress_ratio
            parts = keys[:, :tokens].reshape(len(keys), blocks, self.compress_ratio, -1)
            means = parts.astype(mx.float32).mean(axis=2).astype(keys.dtype)
            firsts = positions[..., : tokens : self.compress_ratio]
            return self._apply_rope(self.k_layernorm(means)[:, None], firsts)

        def build_mask(self, selection: Any) -> Any:
            """The columns that each query sees, ``[rows, 1, length, columns]``."""
            ends, complete = selection.query_ends[..., None], selection.complete_counts[..., None]
            columns = mx.arange(selection.key_len)
            blocks = selection.key_len // self.compress_ratio
            chosen = mx.zeros((*selection.selected_blocks.shape[:-1], blocks + 1), mx.bool_)
            # No block is the last one here, which has no columns.
            chosen = mx.put_along_axis(
                chosen, selection.selected_blocks % (blocks + 1), mx.array(True), axis=-1
            )
            by_column = mx.take(chosen, mx.minimum(columns // self.compress_ratio, blocks - 1), -1)
            is_tail = columns >= complete * self.compress_ratio
            seen = by_column | is_tail | (complete <= self.block_topk)
            return (seen & (columns < ends))[:, None]

    return RowIndexer


def _language_model(language: Any) -> type:
    class RowLanguageModel(language.LanguageModel):  # type: ignore[misc]
        """A language model with caches of rows."""

        def make_row_caches(self) -> list[Any]:
            """The caches of its layers."""
            return [
                ArraysCache(4 if "ple" in layer else 2)
                if layer.is_linear
                else CacheList(KVCache(), KVCache())
                for layer in self.layers
            ]

        def row_caches(self, layers: Sequence[Any]) -> list[Any]:
            """A step's layers, as the model calls them."""
            return with_indexers(layers, IndexedRows)

    return RowLanguageModel
