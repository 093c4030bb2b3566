"""Logits only where they are wanted: a model's output layer, given fewer positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding


class Head:
    """The output layer of a model, whichever it is: ``lm_head``, or the embedding used as one.

    For a prompt's chunk of hundreds of tokens only the last one's logits matter, and the product
    with the vocabulary is a quarter of a small model's work.
    """

    def __init__(self, model: Any) -> None:
        self._where: mx.array | None = None
        self._axis = 0
        self._seen: list[mx.array] = []
        for name, layer in model.named_modules():
            if isinstance(layer, Embedding | QuantizedEmbedding):
                self._narrow(layer, "as_linear")
            elif name.rpartition(".")[2] == "lm_head":
                self._narrow(layer, "__call__")

    @contextmanager
    def only(self, where: list[int], axis: int) -> Iterator[list[mx.array]]:
        """While inside, the output layer sees only these of its input's positions.

        Yields a list of what it was given, all of it, each time that it was called.
        """
        self._where, self._axis = mx.array(where, mx.int32), axis
        self._seen = []
        try:
            yield self._seen
        finally:
            self._where, self._seen = None, []

    def _narrow(self, layer: Any, method: str) -> None:
        """Python looks for ``__call__`` in the class, hence one of its own for the layer."""
        theirs: Any = type(layer)
        original = getattr(theirs, method)

        def narrowed(own: Any, x: mx.array) -> mx.array:
            result: mx.array = original(own, self._selected(x))
            return result

        layer.__class__ = type(theirs.__name__, (theirs,), {method: narrowed})

    def _selected(self, x: mx.array) -> mx.array:
        if self._where is None:
            return x
        self._seen.append(x)
        return mx.take(x, self._where, axis=self._axis)
