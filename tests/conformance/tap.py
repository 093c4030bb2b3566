"""Records the outputs of a model's layers, to find where two runs begin to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np


class LayerOutput(NamedTuple):
    """The output ``[rows, length, ...]`` of one call of a layer."""

    layer: int
    values: np.ndarray


@contextmanager
def tapped(layers: list[Any]) -> Iterator[Callable[[], list[LayerOutput]]]:
    """Records these layers; yields a callable that returns the outputs since its last call."""
    outputs: list[tuple[int, mx.array]] = []

    def take() -> list[LayerOutput]:
        taken = [LayerOutput(layer, np.array(output)) for layer, output in outputs]
        outputs.clear()
        return taken

    present = [layer for layer in layers if layer is not None]
    kinds = [type(layer) for layer in present]
    for number, layer in enumerate(present):
        object.__setattr__(layer, "__class__", _recording(type(layer), number, outputs))
    try:
        yield take
    finally:
        for layer, kind in zip(present, kinds, strict=True):
            object.__setattr__(layer, "__class__", kind)


def _recording(kind: type, number: int, outputs: list[tuple[int, mx.array]]) -> type:
    """A subclass of ``kind`` whose calls record their first output."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, mx.array):
            outputs.append((number, first))
        return output

    return type(kind.__name__, (kind,), {"__call__": call})
