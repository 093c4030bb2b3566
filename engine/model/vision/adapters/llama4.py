"""llama4: chunked attention, and queries scaled by position in layers without rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.engine.model.adapters.llama4 import attend
from chairlift.engine.model.adapters.rows import has_rows


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.llama4 import language

    attention: Any = language.Attention
    model: Any = language.LlamaModel

    class RowAttention(attention):  # type: ignore[misc]
        """Attention that scales queries by each row's own positions."""

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
            if self.attn_temperature_tuning and not self.use_rope and has_rows(cache):
                return attend(self, x, mask, cache, language)
            return super().__call__(x, mask, cache)

    class RowModel(model):  # type: ignore[misc]
        """A model that takes each layer's mask from the layer's cache."""

        def __call__(
            self,
            input_ids: mx.array | None = None,
            input_embeds: mx.array | None = None,
            mask: Any = None,
            cache: Any = None,
        ) -> Any:
            if cache is None or not has_rows(cache[0]):
                return super().__call__(input_ids, input_embeds, mask, cache)
            h = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
            for layer, layer_cache in zip(self.layers, cache, strict=True):
                h = layer(h, layer_cache.make_mask(h.shape[1]), cache=layer_cache)
            return self.norm(h)

    return {attention: RowAttention, model: RowModel}
