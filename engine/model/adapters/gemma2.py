"""gemma2: lets faster code than the model's own compute attention with capped scores.

That is a kernel over pages, and on the CPU a step of the layer's graph (``engine.cpu.graph``) or
NumPy. Elsewhere the model computes it.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import gemma2

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.step import Part
from chairlift.cache.pages.kernels import Scoring
from chairlift.cache.pages.layer import PagedLayer, PagedMask
from chairlift.engine.model.attention import Attention
from chairlift.engine.model.recorder import is_recording, record


class AttendCapped(Protocol):
    """Computes attention with capped scores."""

    def __call__(self, part: Part, scale: float, softcap: float) -> mx.array:
        """As a part of ``engine.model.attention.Attend``, of float32 arrays."""
        ...


class CappedAttention(gemma2.Attention):  # type: ignore[misc]
    """Attention that a kernel computes if the cache is pages, and that can be recorded as a call.

    Attributes:
        on_host: computes attention to columns; None: the model does.
    """

    on_host: AttendCapped | None = None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """From ``[rows, length, hidden]`` to the same shape."""
        on_host = self.on_host if isinstance(cache, LayerCache) and x.dtype == mx.float32 else None
        if not isinstance(mask, PagedMask) and not is_recording() and on_host is None:
            original: mx.array = super().__call__(x, mask, cache)
            return original
        rows, length, _ = x.shape

        def heads(projected: mx.array) -> mx.array:
            return projected.reshape(rows, length, -1, self.head_dim).swapaxes(1, 2)

        queries, keys = (
            self.rope(heads(project(x)), offset=cache.offset)
            for project in (self.q_proj, self.k_proj)
        )
        keys, values = cache.update_and_fetch(keys, heads(self.v_proj(x)))
        softcap = self.attn_logit_softcapping
        mixed = record(Attention(None, self.scale, softcap), [queries, keys, values], queries.shape)
        if mixed is None and on_host is not None:
            mixed = on_host(Part(cache, queries, keys, values, mask), self.scale, softcap)
        if mixed is None:
            scoring = Scoring(self.scale, mask.window, softcap=softcap)
            mixed = mask.step.attend(queries, keys, cache, scoring)
        output: mx.array = self.o_proj(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return output


class CappedModel(gemma2.GemmaModel):  # type: ignore[misc]
    """A model that wants no array as the mask if the cache is pages."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """From tokens ``[rows, length]`` to ``[rows, length, hidden]``."""
        if cache is None or not isinstance(cache[0], PagedLayer):
            original: mx.array = super().__call__(inputs, cache)
            return original
        h = self.embed_tokens(inputs) * self.args.hidden_size**0.5
        mask = cache[0].make_mask(inputs.shape[1])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, mask, layer_cache)
        normed: mx.array = self.norm(h)
        return normed


BATCHED = {gemma2.Attention: CappedAttention, gemma2.GemmaModel: CappedModel}
