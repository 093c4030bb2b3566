"""The modules of a vision tower, so that an image can be computed a few of them at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from chairlift.engine.device import profile
from chairlift.engine.model.vision.tower_attention import divided_attention


class Stage(NamedTuple):
    """A part of an image's computation, which needs the parts before it.

    Attributes:
        name: of the module, the same in each layer.
        output: of the module; nothing is evaluated.
    """

    name: str
    output: mx.array


class Stages:
    """Records the outputs of the modules of a tower's layers while its graph is built.

    A layer alone may take as long as a step, so the modules that it consists of are recorded, too.

    Args:
        model: mlx-vlm's model. Layers are lists of modules outside of its language model.
    """

    def __init__(self, model: Any) -> None:
        self._stages: list[Stage] | None = None
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
        found = {id(each): (name, each) for layer in layers for name, each in layer.named_modules()}
        for name, module in found.values():
            if callable(module):
                self._record(re.sub(r"\d+", "*", name), module)

    @contextmanager
    def recorded(self) -> Iterator[list[Stage]]:
        """A context in which the modules' outputs are added to the yielded list, in order."""
        stages: list[Stage] = []
        self._stages = stages
        try:
            with ExitStack() as stack:
                if profile.current().on_cpu:
                    add = stages.append
                    stack.enter_context(divided_attention(lambda each: add(Stage("block", each))))
                yield stages
        finally:
            self._stages = None

    def _record(self, name: str, module: Any) -> None:
        base: Any = type(module)
        call: Callable[..., Any] = base.__call__

        def recording(module: Any, *inputs: Any, **settings: Any) -> Any:
            result = call(module, *inputs, **settings)
            output = result[0] if isinstance(result, tuple) else result
            if self._stages is not None and isinstance(output, mx.array):
                self._stages.append(Stage(name, output))
            return result

        module.__class__ = type(base.__name__, (base,), {"__call__": recording})
