"""hunyuan_vl: each token is rotated by its own positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.engine.model.adapters.rows import has_rows


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.hunyuan_vl import language

    attention: Any = language.Attention

    class RowAttention(attention):  # type: ignore[misc]
        """Attention that takes the positions ``[axes, rows, length]`` of all tokens."""

        def __call__(
            self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None
        ) -> Any:
            if not has_rows(cache):
                return super().__call__(x, mask, cache, position_ids)
            rows, length, _ = x.shape

            def heads(projected: mx.array) -> mx.array:
                return projected.reshape(rows, length, -1, self.head_dim).swapaxes(1, 2)

            cos, sin = self._rotation(x, position_ids)
            queries, keys = heads(self.q_proj(x)), heads(self.k_proj(x))
            queries, keys = (
                (each * cos + language.rotate_half(each) * sin).astype(x.dtype)
                for each in (queries, keys)
            )
            if self.config.use_qk_norm:
                queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
            keys, values = cache.update_and_fetch(keys, heads(self.v_proj(x)))
            # Looked up in the module, where ``engine.model.attention`` replaces it.
            mixed = language.scaled_dot_product_attention(
                queries, keys, values, cache=cache, scale=self.scale, mask=mask
            )
            return self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))

        def _rotation(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
            """Cosines and sines ``[rows, 1, length, head]``; each part of a head has an axis."""
            table = self.rotary_emb(x, seq_len=self.config.max_position_embeddings)
            sections = self.xdrope_section or [self.head_dim // 2]
            ends = [sum((2 * sections)[: n + 1]) for n in range(2 * len(sections) - 1)]
            parts = []
            for each in table:
                taken = each[positions].astype(mx.float32)
                split = mx.split(taken, ends, axis=-1)
                joined = [part[n % len(sections)] for n, part in enumerate(split)]
                parts.append(mx.concatenate(joined, axis=-1)[:, None])
            return parts[0], parts[1]

    return {attention: RowAttention}
