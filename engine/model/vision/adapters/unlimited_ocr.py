"""unlimited_ocr: a generated token sees its prompt, and a window of the other generated tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from chairlift.cache.layer import LayerCache, Mask


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.unlimited_ocr import language

    base: Any = language.LanguageModel

    class RowLanguageModel(base):  # type: ignore[misc]
        """A language model that takes the ends of its rows' prompts."""

        def __call__(
            self,
            inputs: mx.array,
            inputs_embeds: Any = None,
            mask: Any = None,
            cache: Any = None,
            position_ids: Any = None,
        ) -> Any:
            """Computes logits.

            Args:
                position_ids: where the prompt of each token ends, ``[rows, length]``.
            """
            if position_ids is not None:
                window = self.config.sliding_window_size or self.config.sliding_window
                mask = _mask(cache[0], position_ids, window)
            return super().__call__(inputs, inputs_embeds, mask, cache)

        def make_row_caches(self) -> list[Any]:
            """The caches of its layers, which keep all tokens."""
            return [KVCache() for _ in self.layers]

    return {base: RowLanguageModel}


def _mask(layer: LayerCache, ends: mx.array, window: int | None) -> Mask:
    length = ends.shape[1]
    # NOTE: this also refuses packed layers, whose masks cannot be changed.
    behind = layer.ring.behind(length)
    positions = layer.offset[:, None] + mx.arange(length)
    if window is None or int((positions - ends).max()) < window:
        return layer.make_mask(length)
    # With full attention a row's tokens are in the columns of their positions.
    in_prompt = mx.arange(behind.shape[-1]) < ends[..., None]
    seen = layer.make_mask(length, return_array=True)
    assert isinstance(seen, mx.array)
    return seen & (in_prompt | (behind < window))[:, None]
