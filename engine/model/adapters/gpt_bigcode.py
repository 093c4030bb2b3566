"""gpt_bigcode: looks up learned positions for each row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt_bigcode

from chairlift.engine.model.adapters.rows import has_rows


class RowModel(gpt_bigcode.GPTBigCodeModel):  # type: ignore[misc]
    """A model that embeds each row's own positions."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if cache is None or not has_rows(cache[0]):
            original: mx.array = super().__call__(inputs, cache)
            return original
        length = inputs.shape[1]
        positions = cache[0].offset[:, None] + mx.arange(length)
        # A row's padding may lie beyond the last learned position.
        last = self.wpe.weight.shape[0] - 1
        h = self.wte(inputs) + self.wpe(mx.minimum(positions, last))
        mask = cache[0].make_mask(length)
        for layer, layer_cache in zip(self.h, cache, strict=True):
            h = layer(h, mask, cache=layer_cache)
        normed: mx.array = self.ln_f(h)
        return normed


BATCHED = {gpt_bigcode.GPTBigCodeModel: RowModel}
