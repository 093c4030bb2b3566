"""gemma2: capped scores, which the kernels over pages compute; with other caches the model does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma2

from chairlift.cache.pages.kernels import Scoring
from chairlift.cache.pages.layer import PagedMask


class CappedAttention(gemma2.Attention):  # type: ignore[misc]
    """Attention that leaves its scores to a kernel if the cache is pages."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """From ``[rows, length, hidden]`` to the same shape."""
        if not isinstance(mask, PagedMask):
            original: mx.array = super().__call__(x, mask, cache)
            return original
        rows, length, _ = x.shape

        def heads(projected: mx.array) -> mx.array:
            return projected.reshape(rows, length, -1, self.head_dim).swapaxes(1, 2)

        queries, keys = (
            self.rope(heads(project(x)), offset=cache.offset)
            for project in (self.q_proj, self.k_proj)
        )
        keys, _ = cache.update_and_fetch(keys, heads(self.v_proj(x)))
        scoring = Scoring(self.scale, mask.window, softcap=self.attn_logit_softcapping)
        mixed = mask.step.attend(queries, keys, cache, scoring)
        output: mx.array = self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return output


BATCHED = {gemma2.Attention: CappedAttention}
