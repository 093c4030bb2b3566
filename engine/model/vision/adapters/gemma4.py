"""gemma4: an image's tokens see each other in both directions, wherever a chunk begins.

Layers without keys of their own are adapted as in ``model.adapters.gemma4_text``.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.engine.model.adapters.gemma4_text import attend, read_by
from chairlift.engine.model.adapters.rows import has_rows
from chairlift.engine.model.vision.together import mask_of


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.gemma4 import language

    base: Any = language.Gemma4TextModel
    attention: Any = language.Attention

    class RowAttention(attention):  # type: ignore[misc]
        """Attention that reads another layer's keys from the cache, if it has none of its own."""

        original_class = attention

        def __call__(
            self,
            x: mx.array,
            mask: Any = None,
            cache: Any = None,
            shared_kv: Any = None,
            offset: Any = None,
        ) -> Any:
            if has_rows(cache):
                reads = self.is_kv_shared_layer
                return attend(self, x, mask, cache, language, reads), None, None
            return super().__call__(x, mask, cache, shared_kv, offset)

    class RowModel(base):  # type: ignore[misc]
        """Takes masks from the caches, which need no positions on the host."""

        def __call__(self, *args: Any, cache: Any = None, **more: Any) -> Any:
            return super().__call__(*args, cache=read_by(cache, self.previous_kvs), **more)

        def _make_masks(self, h: mx.array, cache: Any, mm_token_type_ids: Any = None) -> Any:
            """The mask of each layer.

            Args:
                mm_token_type_ids: ``[1, length]``, the number of the image that each token is in,
                    from 1 on; None without images.
            """
            if not has_rows(cache[0]):
                return super()._make_masks(h, cache, mm_token_type_ids)
            masks: dict[str, Any] = {}
            for layer, layer_cache in zip(self.layers, cache, strict=True):
                kind = layer.layer_type
                if kind not in masks:
                    window = self.window_size if kind == "sliding_attention" else None
                    masks[kind] = _mask(h.shape[1], layer_cache, window, mm_token_type_ids)
            return [masks[layer.layer_type] for layer in self.layers]

    return {base: RowModel, attention: RowAttention}


def _mask(length: int, cache: Any, window: int | None, runs: mx.array | None) -> Any:
    if runs is None:
        return cache.make_mask(length, window_size=window)
    return mask_of(length, cache, window, runs)
