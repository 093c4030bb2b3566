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
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.split import PackedMask
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
# The names of an argument with a mask: for attention, and for states, of which it hides none.
_MASKS = ("mask", "attention_mask", "attn_mask")
_STATE_MASKS = ("mamba_mask",)
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

    def __call__(self, x: mx.array, given: Mapping[str, Any]) -> Any:
        """What the layer returns for ``[..., tokens, 1, numbers]``; None if it has to be called.

        Args:
            given: the further arguments by name.
        """
        tokens = _tokens(x)
        if x.dtype != mx.float32 or x.shape != self._form.shape(tokens) or tokens > MAX_TOKENS:
            return None
        lowered, caches = self.lowered(tokens), _caches(given.get(CACHE), tokens)
        if lowered is None or not all(each.is_plain for each in lowered.products):
            return None
        if caches is None:
            return None
        offset = self._offset(caches, given)
        if not self._fits(lowered, caches, offset, given):
            return None
        masks = [given[name] for name in _MASKS if name in given]
        call = LayerCall(masks[0] if masks else None, *caches, offset)
        _copy(lowered, call, x, given)
        with np.errstate(all="ignore"):  # as in MLX
            for step in lowered.steps:
                step(call)
        # The arrays have their numbers already: a further operation would be evaluated later.
        results = tuple(
            None if each is None else mx.array(np.ascontiguousarray(each))
            for each in lowered.results
        )
        return results if lowered.returns_tuple else results[0]

    def lowered(self, tokens: int) -> Lowered | None:
        """The steps for a number of tokens; None if there are none."""
        if tokens not in self._own.by_tokens:
            self._own.by_tokens[tokens] = _TRIAL.attempt(
                lambda: Lowering(trace(self._layer, tokens, self._form), lower_call).lowered()
            )
        return self._own.by_tokens[tokens]

    def _offset(self, caches: _Caches, given: Mapping[str, Any]) -> Any:
        """The tokens' positions, which a layer without keys has as an argument."""
        if caches.attention is not None:
            return caches.attention.offset
        return given.get(self._form.positions[0]) if self._form.positions else None

    def _fits(
        self, lowered: Lowered, caches: _Caches, offset: Any, given: Mapping[str, Any]
    ) -> bool:
        """Whether arguments and states have the form for which there are steps."""
        attention, state = caches
        if lowered.uses_cache and attention is None and state is None:
            return False
        if bool(lowered.states or lowered.in_place) != (state is not None):
            return False
        if any(given.get(name) is not offset for name in self._form.positions):
            return False
        # Nothing in a graph masks states.
        masks = () if attention is None and state is not None else _MASKS
        known = {CACHE, *masks, *self._form.positions, *lowered.others}
        if not all(_is_nothing(name, value) for name, value in given.items() if name not in known):
            return False
        arrays = [(given.get(name), memory.shape) for name, memory in lowered.others.items()]
        if lowered.offset is not None:
            arrays.append((offset, lowered.offset.shape))
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


class _Caches(NamedTuple):
    """The caches of a layer: of keys and values, and of states."""

    attention: Any
    state: StateLayer | None


def _caches(cache: Any, tokens: int) -> _Caches | None:
    """The caches of a layer whose rows have one token each if it has states.

    Returns:
        None if there are other caches, or several of a kind.
    """
    attention: list[Any] = []
    states: list[StateLayer] = []
    for each in cache.caches if isinstance(cache, CacheList) else [cache]:
        if isinstance(each, PackedLayer) and isinstance(each.layers[0], StateLayer):
            part = each.batch_parts[0]
            if len(each.layers) > 1 or len(part.counts) != tokens:
                return None
            each = part.layer
        if isinstance(each, StateLayer):
            states.append(each)
        elif each is not None and not isinstance(each, LayerCache | PackedLayer):
            return None
        elif each is not None:
            attention.append(each)
    if len(attention) > 1 or len(states) > 1:
        return None
    return _Caches(attention[0] if attention else None, states[0] if states else None)


def _is_offset(value: Any, tokens: int) -> bool:
    return isinstance(value, mx.array) and (value.shape, value.dtype) == ((tokens,), mx.int32)


def _is_nothing(name: str, value: Any) -> bool:
    """Whether an argument changes nothing."""
    is_mask = name in (*_MASKS, *_STATE_MASKS) and isinstance(value, PackedMask)
    return value is None or (is_mask and all(each is None for each in value.masks))


def _tokens(x: mx.array) -> int:
    """The number of tokens of ``[..., tokens, 1, numbers]``; 0 for an array of another form."""
    return x.shape[-3] if x.ndim > 2 else 0


def _copy(lowered: Lowered, call: LayerCall, x: mx.array, given: Mapping[str, Any]) -> None:
    """Copies a call's arguments to the memory that the steps read."""
    lowered.x[...] = view(x)
    if lowered.offset is not None:
        lowered.offset[...] = view(call.offset)
    for name, memory in lowered.others.items():
        memory[...] = view(given[name])
    for slot, memory in lowered.states.items():
        assert call.state is not None
        before = call.state[slot]
        assert before is not None
        memory[...] = view(before)


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
    result, cache, tokens = call(), given.get(CACHE), _tokens(x)
    caches = _caches(cache, tokens)
    if caches is None or not tokens:
        return result
    attention, state = caches
    offsets = [each for each in given.values() if _is_offset(each, tokens)]
    offset = attention.offset if attention is not None else offsets[0] if offsets else None
    slots = [] if state is None else state.cache
    stored = () if attention is None else attention.state
    others = {
        name: (value.shape[1:], value.dtype)
        for name, value in given.items()
        if isinstance(value, mx.array)
        and name not in _MASKS
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
