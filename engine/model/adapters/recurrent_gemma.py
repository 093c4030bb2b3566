"""recurrent_gemma: does not scale down the first token of a sequence, in each row separately."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx_lm.models import recurrent_gemma

from chairlift.cache.state import StateLayer
from chairlift.engine.model.adapters.rows import has_rows


class RowRecurrentBlock(recurrent_gemma.RecurrentBlock):  # type: ignore[misc]
    """Computes both cases if some rows are at their first token and others are not."""

    def __call__(self, x: mx.array, cache: Any = None, mask: Any = None) -> mx.array:
        """From ``[rows, length, width]`` to the same shape.

        With a batched cache, ``mask`` is not a mask but a list of booleans: whether each row is at
        its first token.
        """
        if not isinstance(cache, StateLayer) or not any(mask):
            original: mx.array = super().__call__(x, cache=cache)
            return original
        new: list[Any] = [cache[0], None]
        old: list[Any] = [cache[0], cache[1]]
        output: mx.array = super().__call__(x, cache=new)
        if not all(mask):
            fresh = mx.array(mask)
            output = mx.where(fresh[:, None, None], output, super().__call__(x, cache=old))
            new[1] = mx.where(fresh[:, None], new[1], old[1])
        cache[0], cache[1] = new
        return output


class RowModel(recurrent_gemma.Griffin):  # type: ignore[misc]
    """A model that passes to its recurrent layers which rows are at their first token."""

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        attention: Any = cache[self.swa_idx] if cache is not None else None
        if not has_rows(attention):
            original: mx.array = super().__call__(tokens, cache=cache)
            return original
        x = self.embed_tokens(tokens)
        if self.scale_by_sqrt_dim:
            x = x * math.sqrt(x.shape[-1])
        mask = attention.make_mask(tokens.shape[1], self.window_size)
        fresh = [start == 0 for start in attention.offset.tolist()]
        for block, layer in zip(self.layers, cache, strict=True):
            x = block(x, cache=layer, mask=fresh if isinstance(layer, StateLayer) else mask)
        normed: mx.array = self.final_norm(x)
        return normed


BATCHED = {recurrent_gemma.Griffin: RowModel, recurrent_gemma.RecurrentBlock: RowRecurrentBlock}
