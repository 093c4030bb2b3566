"""Checks that a model's tables have a row for every token: MLX reads beyond a table's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding


@contextmanager
def watched(model: Any) -> Iterator[dict[str, int]]:
    """A context that finds the tables that tokens index. All tokens in it must be 0.

    A table that is indexed with other numbers, such as positions, is none of them, unless these
    are all 0 in one call.

    Yields:
        The rows of each table that was indexed with zeros, by the table's dotted path.
    """
    rows: dict[str, int] = {}
    replaced: list[tuple[Any, type]] = []
    for path, layer in model.named_modules():
        if isinstance(layer, Embedding | QuantizedEmbedding):
            replaced.append((layer, type(layer)))
            layer.__class__ = _watching(type(layer), path, rows)
    try:
        yield rows
    finally:
        for layer, base in reversed(replaced):  # a module may have two paths
            layer.__class__ = base


def too_small(rows: dict[str, int], vocabulary: int) -> str | None:
    """A message about a table with fewer rows than the vocabulary has tokens, if there is one."""
    for path, count in rows.items():
        if count < vocabulary:
            return f"{path} has {count} rows, and the vocabulary {vocabulary} tokens"
    return None


def _watching(base: Any, path: str, rows: dict[str, int]) -> type:
    class Watching(base):  # type: ignore[misc]
        def __call__(self, indices: mx.array) -> mx.array:
            if not mx.any(indices).item():
                rows[path] = self.weight.shape[0]
            embedded: mx.array = base.__call__(self, indices)
            return embedded

    return Watching
