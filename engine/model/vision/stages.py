"""The layers of a vision tower, so that an image can be computed a few of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class Stages:
    """Records the outputs of a tower's layers while its graph is built.

    Args:
        model: mlx-vlm's model. Layers are lists of modules outside of its language model.
    """

    def __init__(self, model: Any) -> None:
        self._outputs: list[mx.array] | None = None
        parts = [part for name, part in model.children().items() if name != "language_model"]
        for part in parts:
            if isinstance(part, Module):
                for module in part.modules():
                    self._record_layers(module)

    @contextmanager
    def recorded(self) -> Iterator[list[mx.array]]:
        """A context in which the layers' outputs are added to the yielded list, in order."""
        self._outputs = []
        try:
            yield self._outputs
        finally:
            self._outputs = None

    def _record_layers(self, module: Module) -> None:
        for value in module.children().values():
            if isinstance(value, list) and len(value) > 1:
                for layer in value:
                    if isinstance(layer, Module) and callable(layer):
                        self._record(layer)

    def _record(self, layer: Any) -> None:
        base: Any = type(layer)
        call: Callable[..., Any] = base.__call__

        def recording(layer: Any, *inputs: Any, **settings: Any) -> Any:
            result = call(layer, *inputs, **settings)
            output = result[0] if isinstance(result, tuple) else result
            if self._outputs is not None and isinstance(output, mx.array):
                self._outputs.append(output)
            return result

        layer.__class__ = type(base.__name__, (base,), {"__call__": recording})
