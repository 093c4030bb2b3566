"""gemma3n: layers that share another layer's keys read those of this step's rows only."""

from __future__ import annotations

from typing import Any

from chairlift.engine.model.adapters.rows import has_rows


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.gemma3n import language

    base: Any = language.Gemma3nAttention

    class RowAttention(base):  # type: ignore[misc]
        """Attention that reads the columns that the shared layer has read in this step."""

        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            if not self.is_kv_shared_layer or not has_rows(cache):
                return super().__call__(x, mask, cache)
            rows, length, _ = x.shape
            queries = self.q_norm(self.q_proj(x).reshape(rows, length, -1, self.head_dim))
            queries = self.rope(queries.swapaxes(1, 2), offset=cache.offset)
            # A packed layer keeps what it has read, and ignores these.
            read = getattr(cache, "keys_and_values", lambda: (queries, queries))
            # Looked up in the module, where ``engine.model.attention`` replaces it.
            mixed = language.scaled_dot_product_attention(
                queries, *read(), cache=cache, scale=self.scale, mask=mask
            )
            return self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))

    return {base: RowAttention}
