"""minimax_m3_vl: blocks of keys are chosen for each row, by the row's own positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from chairlift.engine.model.adapters.rows import has_rows
from chairlift.engine.model.vision.adapters.indexed import (
    IndexedLayer,
    empty_caches,
    with_indexers,
)


class IndexedRows(IndexedLayer):
    """The cache of a layer with an indexer."""

    # mlx-vlm's code takes the queries' positions instead, which the model passes.
    index_offset = 0

    def update_index_and_fetch(self, keys: mx.array) -> mx.array:
        """Writes ``[rows, 1, length, dim]``; returns ``[rows, 1, columns, dim]``."""
        nothing = mx.zeros((*keys.shape[:-1], 0), keys.dtype)
        return self.update_index(keys, nothing)[0]


def batched() -> dict[type, type]:
    """The classes that replace those of mlx-vlm."""
    from mlx_vlm.models.minimax_m3_vl import language

    base_model: Any = language.MiniMaxM3Model
    base: Any = language.LanguageModel

    class RowModel(base_model):  # type: ignore[misc]
        """A model that passes each row's positions to the layers."""

        def __call__(
            self, inputs: mx.array, inputs_embeds: Any = None, mask: Any = None, cache: Any = None
        ) -> Any:
            if cache is None or not has_rows(cache[0]):
                return super().__call__(inputs, inputs_embeds, mask, cache)
            h = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
            mask = cache[0].make_mask(h.shape[1])
            positions = cache[0].offset[:, None] + mx.arange(h.shape[1])
            for layer, layer_cache in zip(self.layers, cache, strict=True):
                h = layer(h, mask, layer_cache, position_ids=positions)
                if isinstance(layer_cache, IndexedRows):
                    h = mx.depends(h, layer_cache.written)
            return self.norm(h)

    class RowLanguageModel(base):  # type: ignore[misc]
        """A language model with caches of rows."""

        def __call__(
            self, inputs: mx.array, inputs_embeds: Any = None, cache: Any = None, **others: Any
        ) -> Any:
            if cache is None or not has_rows(cache[0]):
                return super().__call__(inputs, inputs_embeds, cache=cache, **others)
            hidden = self.model(inputs, inputs_embeds, cache=cache)
            return language.LanguageModelOutput(logits=self.logits_from_hidden(hidden))

        def make_row_caches(self) -> list[Any]:
            """The caches of its layers."""
            return empty_caches([layer.self_attn.has_sparse_index for layer in self.layers])

        def row_caches(self, layers: Sequence[Any]) -> list[Any]:
            """A step's layers, as the model calls them."""
            return with_indexers(layers, IndexedRows)

    return {base_model: RowModel, base: RowLanguageModel}
