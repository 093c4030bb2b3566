"""Replaces decoder layers by the steps of their graphs, if a trial shows the same logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from chairlift.cache.state import StateLayer
from chairlift.engine.cpu.compiled.llvm import kernel
from chairlift.engine.cpu.decoder.stack import decode_logits
from chairlift.engine.cpu.graph.graph import Form
from chairlift.engine.cpu.graph.layer import (
    MASKS,
    TRIAL,
    GraphLayer,
    caches_of,
    is_offset,
    tokens_of,
)
from chairlift.engine.cpu.graph.trace import CACHE
from chairlift.engine.model.recorder import is_observed
from chairlift.engine.model.split import arguments

log = logging.getLogger(__name__)

# Differences are noise up to so many times those of slightly other inputs, and to this share.
_NOISES, _MOST_NOISE = 4, 0.05
_TINY = 1e-30
# The rows of ``decode_logits``.
_TRIAL_ROWS = 2


def install(model: Any) -> int:
    """Replaces the decoder layers that the host does not compute yet.

    Returns:
        How many were replaced: none unless a trial gives the same logits.
    """
    layers = [each for each in getattr(model, "layers", ()) if _is_suitable(each)]
    if not layers or not kernel.available():
        return 0
    forms: dict[int, Form] = {}
    expected = _logits(model, layers, partial(_noted, forms))
    if expected is None:
        return 0
    found = [layer for layer in layers if _has_graph(layer, forms.get(id(layer)))]
    actual = _logits(model, found, _computed) if found else None
    if actual is None:
        return 0
    # Products that round their inputs make differences of the last bit larger, from layer to layer.
    right = TRIAL.agree(actual, expected)
    if not right and _distance(actual, expected) > _noise(model, layers[0], expected):
        return 0
    for layer in found:
        _change(layer, _computed)
    log.info("decode by the steps of their graph: %d decoder layers", len(found))
    return len(found)


def _logits(model: Any, layers: Sequence[Any], compute: Callable[..., Any]) -> mx.array | None:
    """The logits of two steps while ``compute`` computes some layers; None if something raises."""
    classes = [type(layer) for layer in layers]
    for layer in layers:
        _change(layer, compute)
    try:
        return TRIAL.attempt(lambda: decode_logits(model))
    finally:
        for layer, original in zip(layers, classes, strict=True):
            layer.__class__ = original


def _noise(model: Any, first: Any, expected: mx.array) -> float:
    """How far the logits may be from the expected ones: a few times as far as those of a model
    whose ``first`` layer gets slightly other numbers.
    """
    other = _logits(model, [first], _shaken)
    return 0.0 if other is None else min(_NOISES * _distance(other, expected), _MOST_NOISE)


def _shaken(layer: Any, call: Callable[..., Any], x: mx.array, given: Mapping[str, Any]) -> Any:
    """Calls a layer with numbers that differ in their last bits."""
    return call(x * (1 + 2**-20))


def _distance(actual: mx.array, expected: mx.array) -> float:
    """The root mean square of the differences, relative to that of the expected numbers."""
    finite = mx.isfinite(expected)
    if actual.shape != expected.shape or not mx.array_equal(mx.isfinite(actual), finite):
        return math.inf
    sums = (mx.where(finite, each, 0).square().sum() for each in (actual - expected, expected))
    difference, reference = (np.array(each).item() for each in sums)
    return math.sqrt(difference / max(reference, _TINY))


def _is_suitable(layer: Any) -> bool:
    """Whether a layer takes a cache, and is computed by its code so far."""
    return callable(layer) and not hasattr(layer, "host") and CACHE in arguments(layer)


def _has_graph(layer: Any, form: Form | None) -> bool:
    """Gives a layer its attribute ``graph``; returns False if the graph has no steps."""
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
    result, cache, tokens = call(), given.get(CACHE), tokens_of(x)
    caches = caches_of(cache, tokens)
    if caches is None or not tokens:
        return result
    attention, state = caches
    offsets = [each for each in given.values() if is_offset(each, tokens)]
    offset = attention.offset if attention is not None else offsets[0] if offsets else None
    slots = [] if state is None else state.cache
    stored = () if attention is None else attention.state
    others = {
        name: (value.shape[1:], value.dtype)
        for name, value in given.items()
        if isinstance(value, mx.array)
        and name not in MASKS
        and value is not offset
        and value.shape[:1] == (tokens,)
    }
    listed = cache.caches if isinstance(cache, CacheList) else ()
    forms[id(layer)] = Form(
        names=arguments(layer),
        width=x.shape[-1],
        leading=x.shape[:-3],
        states=[None if slot is None else slot.shape[1:] for slot in slots],
        kept=[(each.shape[1], each.shape[3]) for each in stored],
        listed=[isinstance(each, StateLayer) for each in listed],
        positions=[name for name, value in given.items() if offset is not None and value is offset],
        others=others,
    )
    return result


def _computed(layer: Any, call: Callable[[], Any], x: Any, given: Mapping[str, Any]) -> Any:
    """Computes a layer by its steps if it can, else by its code."""
    result = None if is_observed() else layer.graph(x, given)
    return call() if result is None else result


def _change(layer: Any, compute: Callable[..., Any]) -> None:
    """Lets ``compute`` compute a layer.

    Args:
        compute: gets the layer, a function that calls its code (perhaps with another first
            argument), its first argument, and the further ones by name.
    """
    base: Any = type(layer)
    names = arguments(layer)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        x = given.pop(names[0])

        def call(first: Any = x) -> Any:
            rest = {names[0]: first, **named} if names[0] in named else named
            return base.__call__(self, *([first, *args[1:]] if args else ()), **rest)

        return compute(self, call, x, given)

    original = getattr(base, "original_class", base)
    own = {"__call__": changed, "original_class": original}
    layer.__class__ = type(base.__name__, (base,), own)
