"""Decoder layers of any form whose few tokens are computed by the steps of their graph.

Between a layer's products, each of MLX's evaluations costs more than what it computes. So a layer's
code runs once for each number of tokens, to show what it computes; from then on the steps run that
``lowering`` makes of it. A layer is replaced only if a trial shows that the steps compute the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.step import PackedLayer
from chairlift.cache.state import StateLayer
from chairlift.engine.cpu.compiled.llvm import kernel
from chairlift.engine.cpu.decoder.layer import MAX_TOKENS
from chairlift.engine.cpu.decoder.stack import decode_logits
from chairlift.engine.cpu.graph.graph import Form
from chairlift.engine.cpu.graph.host_operations import lower_call
from chairlift.engine.cpu.graph.lowering import LayerCall, Lowered, Lowering
from chairlift.engine.cpu.graph.numpy_operations import DTYPES
from chairlift.engine.cpu.graph.trace import CACHE, trace
from chairlift.engine.cpu.views import view
from chairlift.engine.model.recorder import is_observed
from chairlift.engine.model.split import arguments
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

_TRIAL = Trial(elementwise(1e-3), log, error="a decoder layer has no steps: %s")
_CACHES = LayerCache | PackedLayer | StateLayer
# The names of an argument with a mask, for attention.
_MASKS = ("mask", "attention_mask")
# The rows of ``decode_logits``.
_TRIAL_ROWS = 2


class GraphLayer:
    """Computes a decoder layer by the steps of its graph.

    Args:
        layer: the layer.
        form: of its calls.
    """

    def __init__(self, layer: Any, form: Form) -> None:
        self._layer, self._form = layer, form
        self._own = _OwnSteps()

    def __call__(self, x: mx.array, given: Mapping[str, Any]) -> mx.array | None:
        """``[tokens, 1, numbers]`` → the same; None if the layer itself has to compute it.

        Args:
            given: the further arguments by name.
        """
        if x.dtype != mx.float32 or x.shape[1:] != (1, self._form.width) or len(x) > MAX_TOKENS:
            return None
        lowered, cache = self.lowered(len(x)), given.get(CACHE)
        if lowered is None or not all(each.is_plain for each in lowered.products):
            return None
        if not (isinstance(cache, _CACHES) or (cache is None and not lowered.uses_cache)):
            return None
        state = _state_layer(cache, len(x))
        stored = lowered.states or lowered.in_place
        if bool(stored) != (state is not None) or not self._fits(lowered, state, given):
            return None
        _copy(lowered, state, x, given)
        masks = [given[name] for name in _MASKS if name in given]
        call = LayerCall(masks[0] if masks else None, cache, state)
        with np.errstate(all="ignore"):  # as in MLX
            for step in lowered.steps:
                step(call)
        # The array has its numbers already: a further operation on it would be evaluated later.
        return mx.array(np.ascontiguousarray(lowered.result))

    def lowered(self, tokens: int) -> Lowered | None:
        """The steps for a number of tokens; None if there are none."""
        if tokens not in self._own.by_tokens:
            self._own.by_tokens[tokens] = _TRIAL.attempt(
                lambda: Lowering(trace(self._layer, tokens, self._form), lower_call).lowered()
            )
        return self._own.by_tokens[tokens]

    def _fits(self, lowered: Lowered, state: StateLayer | None, given: Mapping[str, Any]) -> bool:
        """Whether arguments and states have the form for which there are steps."""
        for name in given.keys() - lowered.others.keys() - {CACHE, *_MASKS}:
            if given[name] is not None:
                return False
        arrays = [(given.get(name), memory.shape) for name, memory in lowered.others.items()]
        if state is not None:
            shapes = {slot: memory.shape for slot, memory in lowered.states.items()}
            arrays += [(state[slot], own) for slot, own in (shapes | lowered.in_place).items()]
        return all(
            isinstance(each, mx.array) and each.shape == own and each.dtype in DTYPES
            for each, own in arrays
        )


class _OwnSteps(threading.local):
    """The steps by number of tokens, for each thread: steps share memory."""

    def __init__(self) -> None:
        self.by_tokens: dict[int, Lowered | None] = {}


def _copy(
    lowered: Lowered, state: StateLayer | None, x: mx.array, given: Mapping[str, Any]
) -> None:
    """Copies a call's arguments to the memory that the steps read."""
    lowered.x[...] = view(x)
    if lowered.offset is not None:
        lowered.offset[...] = view(given[CACHE].offset)
    for name, memory in lowered.others.items():
        memory[...] = view(given[name])
    for slot, memory in lowered.states.items():
        assert state is not None
        before = state[slot]
        assert before is not None
        memory[...] = view(before)


def _state_layer(cache: Any, tokens: int) -> StateLayer | None:
    """The cache of a recurrent layer, if its rows have one token each."""
    if isinstance(cache, PackedLayer):
        part = cache.batch_parts[0]
        alone = len(cache.batch_parts) == 1 and len(part.counts) == tokens
        cache = part.layer if alone else None
    return cache if isinstance(cache, StateLayer) else None


def install(model: Any) -> int:
    """Replaces the decoder layers that the host does not compute yet.

    Returns:
        How many were replaced: none unless a trial gives the same logits.
    """
    layers = [each for each in getattr(model, "layers", ()) if _is_suitable(each)]
    if not layers or not kernel.available():
        return 0
    classes = [type(layer) for layer in layers]
    forms: dict[int, Form] = {}
    for layer in layers:
        _change(layer, partial(_noted, forms))
    expected = _TRIAL.attempt(lambda: decode_logits(model))
    for layer, original in zip(layers, classes, strict=True):
        layer.__class__ = original
    if expected is None:
        return 0
    found = [layer for layer in layers if _has_graph(layer, forms.get(id(layer)))]
    for layer in found:
        _change(layer, _computed)
    if found and _TRIAL.passes(lambda: expected, lambda: decode_logits(model)):
        log.info("decode by the steps of their graph: %d decoder layers", len(found))
        return len(found)
    for layer, original in zip(layers, classes, strict=True):
        layer.__class__ = original
    return 0


def _is_suitable(layer: Any) -> bool:
    """Whether a layer takes a cache, and is computed by its code so far."""
    return callable(layer) and not hasattr(layer, "host") and CACHE in arguments(layer)


def _has_graph(layer: Any, form: Form | None) -> bool:
    """Whether a layer has steps, which it then has as ``graph``."""
    if form is None:
        return False
    graph = GraphLayer(layer, form)
    if graph.lowered(_TRIAL_ROWS) is None:
        return False
    layer.graph = graph
    return True


def _noted(
    forms: dict[int, Form], layer: Any, call: Callable[[], Any], x: Any, given: Mapping[str, Any]
) -> Any:
    """Calls a layer, and notes the form of its calls."""
    result, cache = call(), given.get(CACHE)
    slots = cache.cache if isinstance(cache, StateLayer) else []
    states = tuple(None if slot is None else slot.shape[1:] for slot in slots)
    others = {
        name: (value.shape[1:], value.dtype)
        for name, value in given.items()
        if isinstance(value, mx.array) and name not in _MASKS and value.shape[:1] == x.shape[:1]
    }
    forms[id(layer)] = Form(arguments(layer), x.shape[-1], states, others)
    return result


def _computed(layer: Any, call: Callable[[], Any], x: Any, given: Mapping[str, Any]) -> Any:
    """Computes a layer by its steps if it can, else by its code."""
    result = None if is_observed() else layer.graph(x, given)
    return call() if result is None else result


def _change(layer: Any, compute: Callable[..., Any]) -> None:
    """Lets ``compute`` compute a layer.

    Args:
        compute: gets the layer, a function that calls its code, its first argument, and the further
            ones by name.
    """
    base: Any = type(layer)
    names = arguments(layer)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        x = given.pop(names[0])
        return compute(self, partial(base.__call__, self, *args, **named), x, given)

    original = getattr(base, "original_class", base)
    own = {"__call__": changed, "original_class": original}
    layer.__class__ = type(base.__name__, (base,), own)
