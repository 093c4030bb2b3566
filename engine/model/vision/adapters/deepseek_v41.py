"""deepseek_v41: rows complete their groups of tokens in different steps.

mlx-vlm has one cache for all layers, and layers read what those before them left in it. Here each
layer has a window, and some have groups of tokens besides; one more window has the last tokens, of
which n-grams are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from chairlift.cache.layer import LayerCache
from chairlift.engine.model.vision.adapters.pooled import PooledLayer

# A token before the first one, or one that is in no n-gram.
_NONE = -1


class StepLayers:
    """A step's layers as one cache of mlx-vlm, and what a layer leaves for those behind it.

    Args:
        layers: the caches of each layer, and perhaps the window of the last tokens.
        count: the number of layers.
    """

    def __init__(self, layers: Sequence[Any], count: int) -> None:
        self.layers = [layer.caches for layer in layers[:count]]
        self.last_tokens: LayerCache | None = layers[count] if len(layers) > count else None
        self.offset: mx.array = self.layers[0][0].offset
        self.compress_kv: Any = None
        self.index_k: Any = None
        self.topk_idxs: Any = None
        self.candidates: Any = None

    def map(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Calls a function with all rows at once."""
        return function(self, *arrays)

    def advance(self, width: int) -> None:
        """Does nothing: the step counts its tokens."""


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.deepseek_v41 import language

    return {
        language.Indexer: _indexer(language),
        language.DeepseekV41Attention: _attention(language),
        language.LanguageModel: _language_model(language),
    }


def _indexer(language: Any) -> type:
    class RowIndexer(language.Indexer):  # type: ignore[misc]
        """Restricts each row's queries to the groups that are complete in that row."""

        def keys(self, latent: mx.array, positions: mx.array) -> Any:
            """Keys of groups, ``[rows, groups, dim]``, by the positions of their first tokens."""
            keys = self.k_norm(self.wk(latent))
            return language.fake_quant_fp4_ue8m0(self._rotated(keys, positions))

        def chosen(self, x: mx.array, q_residual: mx.array, cache: StepLayers) -> mx.array:
            """Group numbers ``[rows, length, some]``, -1 for none; sets ``cache.candidates``."""
            rows, length, _ = x.shape
            positions = cache.offset[:, None] + mx.arange(length)
            queries = self.wq_b(language.fake_quant_fp8_ue8m0(q_residual))
            queries = queries.reshape(rows, length, self.n_heads, self.index_head_dim)
            queries = self._rotated(queries, positions[..., None])
            complete = ((positions + 1) // self.compress_ratio)[..., None]
            scores = language._index_scores(
                language.fake_quant_fp4_ue8m0(queries),
                cache.index_k,
                self.weights_proj(x) * (self.scale * self.n_heads**-0.5),
                complete,
                cache.candidates if self.uses_candidates else None,
            )
            if self.is_candidate_source:
                cache.candidates = language.select_candidate_blocks(
                    scores, complete, self.candidate_topk_blocks, self.candidate_block_size
                )
            count = min(self.index_topk, scores.shape[-1])
            best = mx.argsort(-scores, axis=-1)[..., :count].astype(mx.int32)
            return mx.where(best < complete, best, -1)

        def _rotated(self, x: mx.array, positions: mx.array) -> Any:
            return language._apply_rope_at_positions(
                x, positions, self.rope_head_dim, self.rope_theta, self.yarn
            )

    return RowIndexer


def _attention(language: Any) -> type:
    class RowAttention(language.DeepseekV41Attention):  # type: ignore[misc]
        """Attention to a row's window, and to the chosen ones of its groups."""

        def _window_part(self, x: mx.array, start_pos: Any, cache: Any) -> Any:
            """Columns ``[rows, columns, dim]``, and which of them each query sees."""
            if not isinstance(cache, StepLayers):
                return super()._window_part(x, start_pos, cache)
            layer = cache.layers[self.layer_idx][0]
            new = self.kv_norm(self.wkv(language.fake_quant_fp8_ue8m0(x)))[:, None]
            new = language.fake_quant_fp8_ue8m0(self.rope(new, start_pos))
            seen, _ = layer.update_and_fetch(new, mx.zeros((*new.shape[:-1], 0), new.dtype))
            return seen[:, 0], layer.make_mask(x.shape[1], return_array=True)

        def _compress_part(self, x: mx.array, qr: mx.array, start_pos: Any, cache: Any) -> Any:
            """Groups ``[rows, groups, dim]``, and the numbers of those that each query reads."""
            if not isinstance(cache, StepLayers):
                return super()._compress_part(x, qr, start_pos, cache)
            if self.is_kv_source:
                groups = self._groups(x, cache.layers[self.layer_idx])
                cache.compress_kv, cache.index_k = mx.split(groups, [self.head_dim], axis=-1)
            if self.indexer is not None:
                cache.topk_idxs = self.indexer.chosen(x, qr, cache)
            return cache.compress_kv, cache.topk_idxs

        def _groups(self, x: mx.array, layers: Sequence[LayerCache]) -> mx.array:
            """The groups of all tokens, each with its key: ``[rows, groups, dim]``."""
            entries = layers[1]
            if self.compress_ratio == 1:
                return PooledLayer(entries, None, 1).update_and_fetch(
                    self.compressor(x, 0, None), x[..., :0], self._single
                )
            pooled = PooledLayer(entries, layers[2], self.compress_ratio)
            h = x.astype(mx.float32)

            def pool(kv: mx.array, scores: mx.array, numbers: mx.array) -> Any:
                latent = (kv * mx.softmax(scores, axis=2)).sum(axis=2).astype(x.dtype)
                return self._with_keys(self.compressor.norm(latent), numbers)

            return pooled.update_and_fetch(self.compressor.wkv(h), self.compressor.wgate(h), pool)

        def _single(self, latent: mx.array, _: mx.array, numbers: mx.array) -> mx.array:
            return self._with_keys(latent[:, :, 0], numbers)

        def _with_keys(self, latent: mx.array, numbers: mx.array) -> mx.array:
            positions = numbers * self.compress_ratio
            rotated = language._apply_rope_at_positions(
                latent,
                positions,
                self.config.qk_rope_head_dim,
                self._latent_theta,
                self._latent_yarn,
            )
            parts = [language.fake_quant_fp4_e4m3(rotated)]
            if self.indexer is not None:
                parts.append(self.indexer.keys(latent, positions))
            return mx.concatenate(parts, axis=-1)

    return RowAttention


def _language_model(language: Any) -> type:
    class RowLanguageModel(language.LanguageModel):  # type: ignore[misc]
        """A language model with caches of rows."""

        def __call__(
            self, input_ids: Any = None, inputs_embeds: Any = None, cache: Any = None, **others: Any
        ) -> Any:
            if cache and isinstance(cache[0], StepLayers):
                others["engram_hashes"] = self._hashes(input_ids, cache[0])
            return super().__call__(input_ids, inputs_embeds, cache, **others)

        def _hashes(self, input_ids: mx.array, cache: StepLayers) -> Any:
            """The numbers of the n-grams that end at each token; None if the model has none."""
            self._ensure_engram_hash()
            if self.engram_hash is None or cache.last_tokens is None:
                return None
            is_text = input_ids != self.config.image_token_id
            window, before = cache.last_tokens, self.layout.max_ngram_size - 1
            length = input_ids.shape[1]
            new = mx.where(is_text, self.engram_hash._token_map[input_ids], _NONE)
            new = new.astype(mx.float32)[:, None, :, None]
            seen, _ = window.update_and_fetch(new, mx.zeros((*new.shape[:-1], 0)))
            ago = mx.broadcast_to(mx.arange(before, 0, -1), (len(input_ids), before))
            last = mx.take_along_axis(
                seen[:, 0, :, 0], window.ring.index(ago + length - 1, length), 1
            )
            last = mx.where(ago <= cache.offset[:, None], last, _NONE).astype(mx.int64)
            state = SimpleNamespace(engram=last)
            return self.engram_hash(input_ids, before, state, token_mask=is_text)

        def make_row_caches(self) -> list[Any]:
            """The caches of its layers, and a window of the last tokens if it has n-grams."""
            caches = [_caches(layer.attn) for layer in self.layers]
            if self.layout is not None:
                caches.append(RotatingKVCache(self.layout.max_ngram_size))
            return caches

        def row_caches(self, layers: Sequence[Any]) -> list[Any]:
            """A step's layers, as the model calls them."""
            return [StepLayers(layers, len(self.layers))]

    return RowLanguageModel


def _caches(attention: Any) -> Any:
    caches = [RotatingKVCache(attention.window_size)]
    if attention.is_kv_source and attention.compress_ratio:
        caches.append(KVCache())
        if attention.compress_ratio > 1:
            caches.append(RotatingKVCache(attention.compress_ratio))
    return CacheList(*caches)
