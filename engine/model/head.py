"""Computes a model's logits at selected positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding


class Head:
    """A model's output layer: ``lm_head``, or the embedding if that is also the output layer.

    A prompt chunk of hundreds of tokens needs the logits of its last token only, and the product
    with the vocabulary is a quarter of a small model's work.
    """

    def __init__(self, model: Any) -> None:
        self._positions: mx.array | None = None
        self._axis = 0
        self._inputs: list[mx.array] = []
        for name, layer in model.named_modules():
            if isinstance(layer, Embedding | QuantizedEmbedding):
                self._replace(layer, "as_linear")
            elif name.rpartition(".")[2] == "lm_head":
                self._replace(layer, "__call__")

    @contextmanager
    def select(self, positions: mx.array, axis: int) -> Iterator[list[mx.array]]:
        """A context in which the output layer computes only these positions of its input's axis.

        Yields a list to which each call of the layer appends its complete input.

        Args:
            positions: ``[positions]`` int32.
        """
        self._positions, self._axis = positions, axis
        self._inputs = []
        try:
            yield self._inputs
        finally:
            self._positions, self._inputs = None, []

    def _replace(self, layer: Any, method: str) -> None:
        """Replaces a method by giving the layer a subclass: Python looks up ``__call__`` there."""
        base: Any = type(layer)
        original = getattr(base, method)

        def at_positions(layer: Any, x: mx.array) -> mx.array:
            result: mx.array = original(layer, self._selected(x))
            return result

        layer.__class__ = type(base.__name__, (base,), {method: at_positions})

    def _selected(self, x: mx.array) -> mx.array:
        if self._positions is None:
            return x
        self._inputs.append(x)
        return mx.take(x, self._positions, axis=self._axis)
