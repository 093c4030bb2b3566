"""The modules of a vision tower, so that an image can be computed a few of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class Stages:
    """Records the outputs of the modules of a tower's layers while its graph is built.

    A layer alone may take as long as a step, so the modules that it consists of are recorded, too.

    Args:
        model: mlx-vlm's model. Layers are lists of modules outside of its language model.
    """

    def __init__(self, model: Any) -> None:
        self._outputs: list[mx.array] | None = None
        parts = [part for name, part in model.children().items() if name != "language_model"]
        towers = [part for part in parts if isinstance(part, Module)]
        modules = [module for tower in towers for module in tower.modules()]
        layers = [
            layer
            for module in modules
            for value in module.children().values()
            if isinstance(value, list) and len(value) > 1
            for layer in value
            if isinstance(layer, Module)
        ]
        # A layer may have lists of modules itself.
        found = {id(module): module for layer in layers for module in layer.modules()}
        for module in found.values():
            if callable(module):
                self._record(module)

    @contextmanager
    def recorded(self) -> Iterator[list[mx.array]]:
        """A context in which the modules' outputs are added to the yielded list, in order."""
        self._outputs = []
        try:
            yield self._outputs
        finally:
            self._outputs = None

    def _record(self, module: Any) -> None:
        base: Any = type(module)
        call: Callable[..., Any] = base.__call__

        def recording(module: Any, *inputs: Any, **settings: Any) -> Any:
            result = call(module, *inputs, **settings)
            output = result[0] if isinstance(result, tuple) else result
            if self._outputs is not None and isinstance(output, mx.array):
                self._outputs.append(output)
            return result

        module.__class__ = type(base.__name__, (base,), {"__call__": recording})
