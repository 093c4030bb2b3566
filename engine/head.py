"""Logits only where they are wanted: a model's output layer, given fewer positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

Select = Callable[[mx.array], mx.array]


class Head:
    """The output layer of a model, whichever it is: ``lm_head``, or the embedding used as one.

    For a prompt's chunk of hundreds of tokens only the last one's logits matter, and the product
    with the vocabulary is a quarter of a small model's work.
    """

    def __init__(self, model: Any) -> None:
        self._select: Select | None = None
        for name, layer in model.named_modules():
            if isinstance(layer, Embedding | QuantizedEmbedding):
                self._narrow(layer, "as_linear")
            elif name.rpartition(".")[2] == "lm_head":
                self._narrow(layer, "__call__")

    @contextmanager
    def only(self, select: Select) -> Iterator[None]:
        """While inside, the output layer sees only what ``select`` takes of its input."""
        self._select = select
        try:
            yield
        finally:
            self._select = None

    def _narrow(self, layer: Any, method: str) -> None:
        """Python looks for ``__call__`` in the class, hence one of its own for the layer."""
        theirs: Any = type(layer)
        original = getattr(theirs, method)

        def narrowed(own: Any, x: mx.array) -> mx.array:
            result: mx.array = original(own, x if self._select is None else self._select(x))
            return result

        layer.__class__ = type(theirs.__name__, (theirs,), {method: narrowed})
