"""Lets another way to call a model send each token to the same experts.

A router takes the experts with the largest of many scores, some of which are nearly equal. So the
rounding of an equivalent calculation sends a few tokens to other experts, which changes the logits
as much as a real error would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from chairlift.engine.model.recorder import observed

# The layers of experts of all model files: they are called with the tokens and their experts.
_LAYERS: tuple[Any, ...] = (SwitchGLU, SwitchMLP)

Calculation = Callable[[], mx.array]
# Called with a layer and its ``[..., experts of a token]`` indices; returns those to use.
_Choose = Callable[[Any, mx.array], mx.array]


class ExpertChoices:
    """The experts of all tokens of a run, by layer; in each layer, tokens come in the same order
    in all ways to call a model.
    """

    def __init__(self) -> None:
        # For each layer, ``[tokens, experts of a token]`` of each call.
        self._recorded: dict[int, list[mx.array]] = {}

    def record(self, run: Calculation) -> mx.array:
        """Runs a calculation, and remembers the experts of its tokens."""
        self._recorded.clear()

        def note(layer: Any, indices: mx.array) -> mx.array:
            flat = indices.reshape(-1, indices.shape[-1])
            self._recorded.setdefault(id(layer), []).append(flat)
            return indices

        with _chosen(note):
            result = run()
            mx.eval(result, *self._recorded.values())
        return result

    def repeat(self, run: Calculation) -> mx.array:
        """Runs a calculation with the recorded experts.

        If it computes more or fewer tokens, because some are padding, they choose by themselves.
        """
        recorded = {layer: mx.concatenate(calls) for layer, calls in self._recorded.items()}
        taken = dict.fromkeys(recorded, 0)
        alike = True

        def replaced(layer: Any, indices: mx.array) -> mx.array:
            nonlocal alike
            own = indices.reshape(-1, indices.shape[-1])
            begin = taken.get(id(layer), 0)
            stop = taken[id(layer)] = begin + len(own)
            known = recorded.get(id(layer))
            if known is None or stop > len(known) or known.shape[1] != own.shape[1]:
                alike = False
                return indices
            return with_experts(own, known[begin:stop]).reshape(indices.shape)

        with _chosen(replaced):
            result = run()
            mx.eval(result)
        if alike and all(taken[layer] == len(known) for layer, known in recorded.items()):
            return result
        return run()


def with_experts(own: mx.array, wanted: mx.array) -> mx.array:
    """Replaces experts that are not wanted by those that are missing.

    A token's experts may come in any order, and belong to weights in this order. So those that are
    wanted stay in their places.

    Args:
        own, wanted: ``[tokens, experts of a token]`` integers, different ones for each token.
    """
    alike = own[:, :, None] == wanted[:, None, :]
    kept, found = alike.any(axis=2), alike.any(axis=1)
    missing = mx.take_along_axis(wanted, mx.argsort(found, axis=1), axis=1)
    number = mx.maximum(mx.cumsum(mx.logical_not(kept).astype(mx.int32), axis=1) - 1, 0)
    return mx.where(kept, own, mx.take_along_axis(missing, number, axis=1).astype(own.dtype))


@contextmanager
def _chosen(choose: _Choose) -> Iterator[None]:
    """A context in which layers of experts use the experts that ``choose`` returns."""
    originals = [layer.__call__ for layer in _LAYERS]
    try:
        for layer, original in zip(_LAYERS, originals, strict=True):
            layer.__call__ = _changed(original, choose)
        with observed():
            yield
    finally:
        for layer, original in zip(_LAYERS, originals, strict=True):
            layer.__call__ = original


def _changed(original: Callable[..., mx.array], choose: _Choose) -> Callable[..., mx.array]:
    def call(layer: Any, x: mx.array, indices: mx.array) -> mx.array:
        return original(layer, x, choose(layer, indices))

    return call
