"""Decoder layers of any form whose few tokens are computed by the steps of their graph.

Between a layer's products, each of MLX's evaluations costs more than what it computes. So a layer's
code runs once for each number of tokens, to show what it computes; from then on the steps run that
``lowering`` makes of it. A layer is replaced only if a trial shows that the steps compute the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer
from chairlift.cache.state import StateLayer
from chairlift.engine.cpu.decoder.layer import MAX_TOKENS
from chairlift.engine.cpu.graph.graph import Form
from chairlift.engine.cpu.graph.host_operations import lower_call
from chairlift.engine.cpu.graph.lowering import LayerCall, Lowered, Lowering
from chairlift.engine.cpu.graph.numpy_operations import DTYPES
from chairlift.engine.cpu.graph.trace import CACHE, trace
from chairlift.engine.cpu.views import view
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

TRIAL = Trial(elementwise(1e-3), log, error="a decoder layer has no steps: %s")
# Names of arguments with a mask: for attention; and for recurrent layers, where it may hide no
# token.
MASKS = ("mask", "attention_mask", "attn_mask")
STATE_MASKS = ("mamba_mask",)


class Addition(Protocol):
    """Something that a layer's code adds to a product, and its graph does not."""

    @property
    def applies(self) -> bool:
        """Whether it adds anything in the current model call."""
        ...


class GraphLayer:
    """Computes a decoder layer by the steps of its graph.

    Attributes:
        additions: while one of these applies, the layer's code has to compute it.

    Args:
        layer: the layer.
        form: of its calls.
    """

    def __init__(self, layer: Any, form: Form) -> None:
        self._layer, self._form = layer, form
        self._own = _OwnSteps()
        self.additions: Sequence[Addition] = ()

    def __call__(self, x: mx.array, given: Mapping[str, Any]) -> Any:
        """What the layer returns for ``[..., tokens, 1, numbers]``; None if it has to be called.

        Args:
            given: the further arguments by name.
        """
        tokens = tokens_of(x)
        if x.dtype != mx.float32 or x.shape != self._form.shape(tokens) or tokens > MAX_TOKENS:
            return None
        if any(each.applies for each in self.additions):
            return None
        lowered, caches = self.lowered(tokens), caches_of(given.get(CACHE), tokens)
        if lowered is None or caches is None:
            return None
        offset = self._offset(caches, given)
        if not self._fits(lowered, caches, offset, given):
            return None
        masks = [given[name] for name in MASKS if name in given]
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
            self._own.by_tokens[tokens] = TRIAL.attempt(
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
        # The graph of a recurrent layer applies no mask.
        masks = () if attention is None and state is not None else MASKS
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


def caches_of(cache: Any, tokens: int) -> _Caches | None:
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


def is_offset(value: Any, tokens: int) -> bool:
    return isinstance(value, mx.array) and (value.shape, value.dtype) == ((tokens,), mx.int32)


def _is_nothing(name: str, value: Any) -> bool:
    """Whether an argument changes nothing."""
    is_mask = name in (*MASKS, *STATE_MASKS) and isinstance(value, PackedMask)
    return value is None or (is_mask and all(each is None for each in value.masks))


def tokens_of(x: mx.array) -> int:
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
