"""deepseek_v41: rows complete their groups of tokens in different steps.

The model caches three things: a window; one entry and its index key for each complete group of
``ratio`` tokens; and the parts of the tokens in the incomplete group. Here each of the three is a
ring with a column for each token. In the second ring, the entry is in the column of the group's
last token, and the other columns are unused. The third ring is a window of ``ratio`` tokens. So a
group takes the memory of its tokens, but everything that works with rings keeps working, such as
continuing a prefix at any position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from chairlift.cache.layer import LayerCache


@dataclass(slots=True)
class RowCache:
    """The rings of one layer, each ``[rows, 1, columns, dim]``; some layers have only the first."""

    window: LayerCache
    entries: LayerCache | None = None
    parts: LayerCache | None = None

    def update_window(self, kv: mx.array) -> mx.array:
        """Writes ``[rows, length, dim]``; returns the visible columns, ``[rows, columns, dim]``."""
        nothing = mx.zeros((*kv.shape[:1], 1, kv.shape[1], 0), kv.dtype)
        return self.window.update_and_fetch(kv[:, None], nothing)[0][:, 0]


class RowCompressor(deepseek_v41.Compressor):  # type: ignore[misc]
    """Pools the rows' begun groups, even those that this step does not complete."""

    def __call__(self, x: mx.array, start_pos: Any, cache: Any) -> Any:
        """Returns entries ``[rows, groups, dim]``, and each row's first group number ``[rows]``."""
        if not isinstance(cache, RowCache) or cache.parts is None:
            return super().__call__(x, start_pos, cache)
        rows, length, _ = x.shape
        h = x.astype(mx.float32)
        parts = cache.parts.update_and_fetch(self.kv_proj(h)[:, None], self.gate_proj(h)[:, None])
        groups = -(-length // self.ratio)
        first = start_pos // self.ratio
        positions = first[:, None] * self.ratio + mx.arange(groups * self.ratio)
        columns = cache.parts.ring.index(start_pos[:, None] + length - 1 - positions, length)
        kv, gate = (
            _at(part, columns).reshape(rows, groups, self.ratio, part.shape[-1]) for part in parts
        )
        entries = (kv * mx.softmax(gate, axis=2)).sum(axis=2)
        return self.kv_norm(entries.astype(x.dtype)), first


class RowIndexer(deepseek_v41.Indexer):  # type: ignore[misc]
    """Restricts each row's queries to the groups that are complete in that row."""

    def __call__(
        self,
        x: mx.array,
        q_residual: mx.array,
        *,
        index_k: Any,
        candidates: Any,
        rope: Any,
        start_pos: Any,
    ) -> Any:
        """Selects the entries that each query reads.

        Args:
            x, q_residual: ``[rows, length, ...]``.
            index_k: ``[rows, entries, dim]``, by group number; rows with fewer entries are padded
                with arbitrary values.
            candidates: ``[rows, length, entries]``, from the layer that chooses them, or None.
            rope: the layer's rotary embedding.
            start_pos: the rows' positions, ``[rows]``.

        Returns:
            Group numbers ``[rows, length, some]``, -1 for none; and the candidates.
        """
        if not isinstance(start_pos, mx.array) or index_k is None:
            return super().__call__(
                x,
                q_residual,
                index_k=index_k,
                candidates=candidates,
                rope=rope,
                start_pos=start_pos,
            )
        rows, length, _ = x.shape
        queries = self.q_b_proj(q_residual).reshape(rows, length, self.num_heads, self.head_dim)
        queries = deepseek_v41._apply_rope(queries, rope, rope_dim=self.rope_dim, offset=start_pos)
        queries = deepseek_v41._fake_quant_fp4(queries, block_size=32).astype(mx.float32)
        weights = self.weights_proj(x).astype(mx.float32) * self.num_heads**-0.5
        scores = queries @ index_k.astype(mx.float32)[:, None].swapaxes(-1, -2)
        scores = mx.maximum(scores, 0) * self.head_dim**-0.5
        scores = (scores * weights[..., None]).sum(axis=2)
        closed = ((start_pos[:, None] + mx.arange(1, length + 1)) // self.ratio)[..., None]
        scores = mx.where(mx.arange(index_k.shape[1]) < closed, scores, -mx.inf)
        if self.is_candidate_source and self.candidate_topk_blocks > 0:
            candidates = self._candidates(scores, closed)
        elif candidates is not None:
            scores = mx.where(candidates, scores, -mx.inf)
        chosen = _best(scores, self.index_topk)
        return mx.where(chosen < closed, chosen, -1), candidates

    def _candidates(self, scores: mx.array, closed: mx.array) -> mx.array:
        """The entries in the best blocks of each query and in its newest one, as booleans."""
        rows, length, entries = scores.shape
        size = self.candidate_block_size
        padded = mx.pad(scores, [(0, 0), (0, 0), (0, -entries % size)], constant_values=-mx.inf)
        blocks = padded.reshape(rows, length, -1, size).max(axis=-1)
        newest = mx.where(closed > 0, (closed - 1) // size, -1)
        blocks = mx.where(mx.arange(blocks.shape[-1]) == newest, mx.inf, blocks)
        chosen = _best(blocks, self.candidate_topk_blocks)
        seen = mx.take_along_axis(blocks, chosen, axis=-1) > -mx.inf
        kept = mx.put_along_axis(mx.zeros(blocks.shape, mx.bool_), chosen, seen, axis=-1)
        return mx.repeat(kept, size, axis=-1)[..., :entries]


class RowAttention(deepseek_v41.Attention):  # type: ignore[misc]
    """Writes an entry for each token, and reads the entries of complete groups."""

    def _compress(self, x: mx.array, *, start_pos: Any, cache: Any, shared: dict[str, Any]) -> None:
        """Sets ``shared``'s ``compress_kv`` and ``index_k``, ``[rows, entries, dim]``, by group."""
        if not isinstance(cache, RowCache) or cache.entries is None:
            super()._compress(x, start_pos=start_pos, cache=cache, shared=shared)
            return
        rows, length, _ = x.shape
        entries, first = self.compressor(x, start_pos, cache)
        kv = deepseek_v41._fake_quant_fp4(
            self._placed(entries, first), block_size=16, e4m3_scale=True
        )
        # Each token writes its group's entry to its own column; the last token's is complete.
        group = (start_pos[:, None] + mx.arange(length)) // self.ratio - first[:, None]
        group = mx.minimum(group, entries.shape[1] - 1)
        new = [_at(kv[:, None], group)[:, None], mx.zeros((rows, 1, length, 0), kv.dtype)]
        if self.is_index_source:
            keys = self.indexer.k_norm(self.indexer.k_proj(entries))
            keys = deepseek_v41._fake_quant_fp4(self._placed(keys, first), block_size=32)
            new[1] = _at(keys[:, None], group)[:, None]
        cached, cached_keys = cache.entries.update_and_fetch(*new)
        # At least one entry, which no query sees if there is none: so the logits depend on the
        # write, and the step computes it.
        count = max(1, (max(start_pos.tolist()) + length) // self.ratio)
        closing = mx.arange(1, count + 1) * self.ratio - 1
        columns = cache.entries.ring.index(start_pos[:, None] + length - 1 - closing, length)
        shared["compress_kv"] = _at(cached, columns)
        if self.is_index_source:
            shared["index_k"] = _at(cached_keys, columns)

    def _placed(self, entries: mx.array, first: mx.array) -> mx.array:
        """Rotates entries by the position of each group's first token."""
        rotated: mx.array = deepseek_v41._apply_rope(
            entries, self.rope, rope_dim=self.rope_dim, offset=first, scale=self.ratio
        )
        return rotated


class RowText(deepseek_v41.TextModel):  # type: ignore[misc]
    """Passes to the layers each row's position, and the columns of the window's tokens."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if not cache or not isinstance(cache[0], CacheList):
            original: mx.array = super().__call__(inputs, cache)
            return original
        caches = [RowCache(*layer.caches) for layer in cache]
        window, length = caches[0].window, inputs.shape[1]
        positions = window.offset[:, None] + mx.arange(length)
        behind = mx.arange(min(self.args.sliding_window, window.ring.visible(length).width))
        distances = mx.arange(length - 1, -1, -1)[:, None] + behind
        distances = mx.broadcast_to(distances, (len(inputs), *distances.shape))
        columns = window.ring.index(distances, length)
        columns = mx.where(behind <= positions[..., None], columns, -1)

        h = self.embed_tokens(inputs)
        streams = mx.repeat(h[:, :, None], self.args.hc_mult, axis=2)
        mix = mx.broadcast_to(mx.arange(self.args.hc_mult) == 0, streams.shape[:3])
        mix = mix.astype(mx.float32)
        shared: dict[str, Any] = {}
        for layer, layer_cache in zip(self.pipeline_layers, caches, strict=True):
            streams, mix = layer(
                streams,
                mix,
                start_pos=window.offset,
                window_idx=columns,
                cache=layer_cache,
                shared=shared,
            )
        normed: mx.array = self.norm(deepseek_v41._collapse(streams, mix))
        return normed


class RowModel(deepseek_v41.Model):  # type: ignore[misc]
    """A model that makes the caches of its rows."""

    # Models are identified by the module of their class.
    __module__ = deepseek_v41.__name__

    def make_row_caches(self) -> list[CacheList]:
        """The caches of each layer, in the order of ``RowCache``."""
        return [self._row_caches(layer.self_attn) for layer in self.layers]

    def _row_caches(self, attention: Any) -> CacheList:
        caches = [RotatingKVCache(self.args.sliding_window)]
        if attention.ratio and attention.is_kv_source:
            caches.append(KVCache())
            if attention.ratio > 1:
                caches.append(RotatingKVCache(attention.ratio))
        return CacheList(*caches)


def _at(ring: mx.array, columns: mx.array) -> mx.array:
    """Gathers ``columns``, ``[rows, n]``, of ``[rows, 1, columns, dim]``: ``[rows, n, dim]``."""
    gathered: mx.array = deepseek_v41._gather_rows(ring[:, 0], columns[:, None])[:, 0]
    return gathered


def _best(scores: mx.array, count: int) -> mx.array:
    """The indices of the ``count`` highest scores of the last axis, or of all, in no order."""
    count = min(count, scores.shape[-1])
    return mx.argpartition(-scores, count - 1, axis=-1)[..., :count].astype(mx.int32)


BATCHED = {
    deepseek_v41.Attention: RowAttention,
    deepseek_v41.Compressor: RowCompressor,
    deepseek_v41.Indexer: RowIndexer,
    deepseek_v41.Model: RowModel,
    deepseek_v41.TextModel: RowText,
}
