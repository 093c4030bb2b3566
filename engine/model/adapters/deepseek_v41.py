"""deepseek_v41: rows close their groups of tokens in different steps.

The model keeps three things: a window; of each closed group of ``ratio`` tokens one entry and its
index key; of the open group the tokens' parts. Here a token has a column in each of the three: the
second holds the entry in the column of the group's last token, and something of no use in the
others; the third is a window of ``ratio`` tokens. So a group takes the room of its tokens, and all
that rings can do stays possible, such as going on from anywhere.
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
    """One layer's rings, two of which only some layers have: ``[rows, 1, columns, dim]``."""

    window: LayerCache
    entries: LayerCache | None = None
    parts: LayerCache | None = None

    def update_window(self, kv: mx.array) -> mx.array:
        """Writes ``[rows, length, dim]``; returns what is visible of the ring then."""
        nothing = mx.zeros((*kv.shape[:1], 1, kv.shape[1], 0), kv.dtype)
        return self.window.update_and_fetch(kv[:, None], nothing)[0][:, 0]


class RowCompressor(deepseek_v41.Compressor):  # type: ignore[misc]
    """Pools the groups that rows have begun, whether they close in this step or not."""

    def __call__(self, x: mx.array, start_pos: Any, cache: Any) -> Any:
        """Entries ``[rows, groups, dim]``, and the number of each row's first group, ``[rows]``."""
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
    """Lets each row's queries see the groups that have closed in that row."""

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
        """The entries that each query reads, ``[rows, length, some]``, -1 for none; and candidates.

        Args:
            x, q_residual: ``[rows, length, ...]``.
            index_k: ``[rows, entries, dim]``, by number; of rows that have fewer, anything follows.
            candidates: ``[rows, length, entries]``, from the layer that chooses them, or None.
            rope: the layer's.
            start_pos: the rows' positions, ``[rows]``.
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
        """Which entries are in the best blocks of each query, or in its newest one."""
        rows, length, entries = scores.shape
        size = self.candidate_block_size
        whole = mx.pad(scores, [(0, 0), (0, 0), (0, -entries % size)], constant_values=-mx.inf)
        blocks = whole.reshape(rows, length, -1, size).max(axis=-1)
        newest = mx.where(closed > 0, (closed - 1) // size, -1)
        blocks = mx.where(mx.arange(blocks.shape[-1]) == newest, mx.inf, blocks)
        chosen = _best(blocks, self.candidate_topk_blocks)
        seen = mx.take_along_axis(blocks, chosen, axis=-1) > -mx.inf
        kept = mx.put_along_axis(mx.zeros(blocks.shape, mx.bool_), chosen, seen, axis=-1)
        return mx.repeat(kept, size, axis=-1)[..., :entries]


class RowAttention(deepseek_v41.Attention):  # type: ignore[misc]
    """Writes an entry for each token, and reads those of the closed groups."""

    def _compress(self, x: mx.array, *, start_pos: Any, cache: Any, shared: dict[str, Any]) -> None:
        """Shares ``compress_kv`` and ``index_k``, ``[rows, entries, dim]``, by number."""
        if not isinstance(cache, RowCache) or cache.entries is None:
            super()._compress(x, start_pos=start_pos, cache=cache, shared=shared)
            return
        rows, length, _ = x.shape
        entries, first = self.compressor(x, start_pos, cache)
        kv = deepseek_v41._fake_quant_fp4(
            self._placed(entries, first), block_size=16, e4m3_scale=True
        )
        # Every token brings its group's entry to its column; that of the last token is complete.
        group = (start_pos[:, None] + mx.arange(length)) // self.ratio - first[:, None]
        group = mx.minimum(group, entries.shape[1] - 1)
        new = [_at(kv[:, None], group)[:, None], mx.zeros((rows, 1, length, 0), kv.dtype)]
        if self.is_index_source:
            keys = self.indexer.k_norm(self.indexer.k_proj(entries))
            keys = deepseek_v41._fake_quant_fp4(self._placed(keys, first), block_size=32)
            new[1] = _at(keys[:, None], group)[:, None]
        held, held_keys = cache.entries.update_and_fetch(*new)
        # At least one, which nobody sees then: so that a step's work is done with its logits.
        count = max(1, (max(start_pos.tolist()) + length) // self.ratio)
        closing = mx.arange(1, count + 1) * self.ratio - 1
        columns = cache.entries.ring.index(start_pos[:, None] + length - 1 - closing, length)
        shared["compress_kv"] = _at(held, columns)
        if self.is_index_source:
            shared["index_k"] = _at(held_keys, columns)

    def _placed(self, entries: mx.array, first: mx.array) -> mx.array:
        """Rotated by the position of each group's first token."""
        rotated: mx.array = deepseek_v41._apply_rope(
            entries, self.rope, rope_dim=self.rope_dim, offset=first, scale=self.ratio
        )
        return rotated


class RowText(deepseek_v41.TextModel):  # type: ignore[misc]
    """Gives the layers each row's position, and where the window's tokens are in the ring."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if not cache or not isinstance(cache[0], CacheList):
            original: mx.array = super().__call__(inputs, cache)
            return original
        caches = [RowCache(*own.caches) for own in cache]
        window, length = caches[0].window, inputs.shape[1]
        positions = window.offset[:, None] + mx.arange(length)
        behind = mx.arange(min(self.args.sliding_window, window.ring.visible(length).width))
        columns = window.ring.index(mx.arange(length - 1, -1, -1)[:, None] + behind, length)
        columns = mx.where(behind <= positions[..., None], columns, -1)

        h = self.embed_tokens(inputs)
        streams = mx.repeat(h[:, :, None], self.args.hc_mult, axis=2)
        mix = mx.broadcast_to(mx.arange(self.args.hc_mult) == 0, streams.shape[:3])
        mix = mix.astype(mx.float32)
        shared: dict[str, Any] = {}
        for layer, own in zip(self.pipeline_layers, caches, strict=True):
            streams, mix = layer(
                streams,
                mix,
                start_pos=window.offset,
                window_idx=columns,
                cache=own,
                shared=shared,
            )
        normed: mx.array = self.norm(deepseek_v41._collapse(streams, mix))
        return normed


class RowModel(deepseek_v41.Model):  # type: ignore[misc]
    """Says which caches rows need."""

    # A model is known by the module of its class.
    __module__ = deepseek_v41.__name__

    def make_row_caches(self) -> list[CacheList]:
        """A list for each layer, in the order of ``RowCache``."""
        return [self._row_caches(layer.self_attn) for layer in self.layers]

    def _row_caches(self, attention: Any) -> CacheList:
        caches = [RotatingKVCache(self.args.sliding_window)]
        if attention.ratio and attention.is_kv_source:
            caches.append(KVCache())
            if attention.ratio > 1:
                caches.append(RotatingKVCache(attention.ratio))
        return CacheList(*caches)


def _at(held: mx.array, columns: mx.array) -> mx.array:
    """Of ``[rows, 1, columns, dim]`` those at ``[rows, some]``: ``[rows, some, dim]``."""
    gathered: mx.array = deepseek_v41._gather_rows(held[:, 0], columns[:, None])[:, 0]
    return gathered


def _best(scores: mx.array, count: int) -> mx.array:
    """Where the highest of the last axis are, at most ``count`` of them, in no order."""
    count = min(count, scores.shape[-1])
    return mx.argpartition(-scores, count - 1, axis=-1)[..., :count].astype(mx.int32)


BATCHED = {
    deepseek_v41.Attention: RowAttention,
    deepseek_v41.Compressor: RowCompressor,
    deepseek_v41.Indexer: RowIndexer,
    deepseek_v41.Model: RowModel,
    deepseek_v41.TextModel: RowText,
}
