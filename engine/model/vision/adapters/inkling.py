"""inkling: each row's scores depend on the distance of a key, by the row's own positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.engine.model.adapters.rows import has_rows


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.inkling import language

    base: Any = language.InklingAttention

    class RowAttention(base):  # type: ignore[misc]
        """Attention with a summand for each distance of a query and a key."""

        def __call__(self, x: mx.array, cache: Any = None, conv_mask: Any = None) -> Any:
            if cache is None or not has_rows(cache[0]):
                return super().__call__(x, cache, conv_mask)
            layer, state = cache[0], cache[1]
            rows, length, _ = x.shape
            dq, dk, dv, _ = self.qkvr_dims
            q, k, v, r = mx.split(self.qkvr_proj(x), [dq, dq + dk, dq + dk + dv], axis=-1)
            k = self.k_sconv(k, cache=state, mask=conv_mask)
            v = self.v_sconv(v, cache=state, mask=conv_mask)

            def heads(projected: mx.array, count: int) -> mx.array:
                return projected.reshape(rows, length, count, -1).swapaxes(1, 2)

            queries = self.q_norm(heads(q, self.n_heads))
            keys, values = layer.update_and_fetch(
                self.k_norm(heads(k, self.n_kv)), heads(v, self.n_kv)
            )
            # [rows, length, columns]: how many tokens ago a column's token was.
            behind = layer.ring.behind(length)
            seen = layer.make_mask(length, return_array=True)
            if self.sliding:
                seen = seen & (behind < self.sliding)[:, None]
            by_distance = heads(r, self.n_heads) @ self.rel_proj.astype(x.dtype)
            index = mx.clip(behind, 0, self.rel_extent - 1)[:, None]
            bias = mx.take_along_axis(
                by_distance, mx.broadcast_to(index, (*by_distance.shape[:3], index.shape[-1])), -1
            )
            bias = mx.where(((behind >= 0) & (behind < self.rel_extent))[:, None], bias, 0)
            mask = mx.where(seen, bias, -1e30).astype(x.dtype)
            if self.log_floor is not None:
                places = layer.offset[:, None] + mx.arange(1, length + 1)
                tau = 1 + self.log_alpha * mx.log(mx.maximum(places / self.log_floor, 1))
                tau = tau[:, None, :, None].astype(x.dtype)
                queries, mask = queries * tau, mx.where(mask > -1e29, mask * tau, mask)
            mixed = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=self.scale, mask=mask
            )
            return self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))

    return {base: RowAttention}
