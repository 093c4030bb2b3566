"""minimax_m3_vl: divides keys into blocks by a row's positions, not by columns."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import minimax_m3_vl

from chairlift.cache.ring import Ring
from chairlift.engine.model.adapters.rows import has_rows


class RowAttention(minimax_m3_vl.Attention):  # type: ignore[misc]
    """Attention that selects blocks of keys for each row."""

    def _block_mask(self, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
        """The mask that restricts each query to its best blocks and its newest ones.

        Args:
            x: ``[rows, length, hidden]``.
            mask: the cache's mask: an array, "causal" or None.
            offset: the rows' positions, ``[rows]``.
            cache: the indexer's cache; all layers share its ring.

        Returns:
            A summand of the scores, ``[rows, heads, length, visible columns]``, 0 or -inf; or
            ``mask`` if all blocks are kept.
        """
        if not has_rows(cache):
            return super()._block_mask(x, mask, offset, cache)
        ring: Ring = cache.ring  # of columns: pages have no blocks of this size
        rows, length, _ = x.shape
        new = self.index_k_norm(self.index_k_proj(x)[:, None])
        new = self.index_rope(new, offset=offset)
        keys, _ = cache.update_and_fetch(new, mx.zeros((rows, 1, length, 0), new.dtype))
        blocks = -(-(max(offset.tolist()) + length) // self.index_block_size)
        if blocks <= self.index_topk_blocks:
            return mask
        queries = self.index_q_proj(x).reshape(rows, length, self.index_n_heads, -1)
        queries = self.index_rope(self.index_q_norm(queries).swapaxes(1, 2), offset=offset)
        scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        seen = mask if isinstance(mask, mx.array) else cache.make_mask(length, return_array=True)
        kept = self._kept(mx.where(seen, scores, -mx.inf), blocks, offset, ring) & seen
        kept = mx.repeat(kept, self.num_attention_heads // self.index_n_heads, axis=1)
        # Not booleans, because engine.cpu does not support booleans that differ by head. It leaves
        # summands to mlx-lm.
        return mx.where(kept, 0, -mx.inf).astype(x.dtype)

    def _kept(self, scores: mx.array, blocks: int, offset: mx.array, ring: Ring) -> mx.array:
        """The columns of each query's best blocks, as booleans.

        Args:
            scores: ``[rows, heads, length, visible columns]``, -inf for hidden columns.
            blocks: the number of blocks of the longest row; more than are kept.
            offset: the rows' positions, ``[rows]``.
            ring: maps positions to columns.
        """
        length, width = scores.shape[2:]
        size = self.index_block_size
        last = offset[:, None] + length - 1
        behind = last - mx.arange(blocks * size)
        columns = ring.index(behind, length)[:, None, None]
        ordered = mx.take_along_axis(scores, columns, axis=-1)
        ordered = mx.where(((behind >= 0) & (behind < width))[:, None, None], ordered, -mx.inf)
        best = ordered.reshape(*scores.shape[:3], blocks, size).max(axis=-1)

        block = mx.arange(blocks)
        newest = (offset[:, None] + mx.arange(length))[:, None, :, None] // size
        is_local = (block <= newest) & (block > newest - self.index_local_blocks)
        best = mx.where(is_local, mx.inf, best)
        count = self.index_topk_blocks
        chosen = mx.argpartition(-best, count - 1, axis=-1)[..., :count]
        kept = mx.put_along_axis(mx.zeros(best.shape, mx.bool_), chosen, mx.array(True), axis=-1)
        # From blocks back to columns. The cache's mask hides columns without a token.
        block_of_column = mx.maximum(last - ring.behind(length)[:, -1], 0) // size
        return mx.take_along_axis(kept, block_of_column[:, None, None], axis=-1)


BATCHED = {minimax_m3_vl.Attention: RowAttention}
