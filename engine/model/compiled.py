"""Compiles decode steps whose shapes stay the same.

A step of few rows takes as long as the host needs to build and launch it. While shapes stay the
same, Python and MLX do the same work for each operation in every step; ``mx.compile`` does it only
once. This works only with ``queued`` layers: MLX does not see that their buffers change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache, Shared
from chairlift.engine.model.lora_routing import Routing
from chairlift.engine.model.trial import Trial, within_largest

log = logging.getLogger(__name__)

# A shape is compiled after this many steps. Compiling takes as long as three more steps.
STEADY = 8
# With more rows, the device takes longer than the host anyway (measured on an H200).
MAX_ROWS = 64
# The number of compiled shapes that are kept.
MAX_SHAPES = 64
# As a share of the largest logit. Fused operations round less often.
TOLERANCE = 0.05
_TRIAL = Trial(
    within_largest(TOLERANCE),
    log,
    error="decode steps are not compiled: %s",
    level=logging.INFO,
    mismatch="compiled decode steps are wrong for this model; they are not used",
)


class CompiledSteps:
    """Calls a model for a band's decode step, with the call compiled for each steady shape.

    Args:
        routing: the adapters of the rows; None for steps without adapters.
    """

    def __init__(self, model: Any, routing: Routing | None = None) -> None:
        self._model = model
        self._routing = routing
        self._call: Callable[..., mx.array] = mx.compile(self._traced)
        self._band: BatchCache | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._last: tuple[Any, ...] = ()
        # Windows for which each kind of layer gave lengths in the last plain call (``Shared``).
        self._limits: list[list[int | None]] = []
        self._steady = 0
        self._checked = False
        self._gives_up = False
        if routing is not None:
            # Compiled calls contain the adapters' matrices.
            routing.on_change(self._forget)

    def __call__(self, band: BatchCache, tokens: mx.array) -> mx.array:
        """Computes the next logits of a band's rows.

        Args:
            band: must be within a step of one token.
            tokens: ``[rows, 1]``.

        Returns:
            Logits ``[rows, 1, vocabulary]``.
        """
        if not band.queued or self._gives_up or len(band) > MAX_ROWS:
            logits: mx.array = self._model(tokens, cache=band.layers)
            return logits
        if not self._is_steady(band):
            return self._plain(band, tokens)
        compiled = _TRIAL.attempt(lambda: self._compiled(band, tokens))
        if compiled is not None and (self._checked or self._is_right(compiled, band, tokens)):
            return compiled
        self._gives_up = True
        return self._plain(band, tokens)

    def _plain(self, band: BatchCache, tokens: mx.array) -> mx.array:
        """Calls the model uncompiled, and records the windows for which layers gave lengths."""
        logits: mx.array = self._model(tokens, cache=band.layers)
        self._limits = [list(layer.shared.lengths) for layer in _kinds(band)]
        return logits

    def _is_steady(self, band: BatchCache) -> bool:
        """Whether the band's shape is compiled already, or has been the same for long enough."""
        shape = (len(band), *(layer.ring.columns for layer in _kinds(band)), band.capacity.rows)
        self._steady = self._steady + 1 if shape == self._last else 0
        self._last = shape
        if shape in self._known:
            return True
        if self._steady < STEADY:
            return False
        if len(self._known) >= MAX_SHAPES:
            self._forget()
        self._known.add(shape)
        return True

    def _forget(self) -> None:
        self._known.clear()
        self._call = mx.compile(self._traced)

    def _compiled(self, band: BatchCache, tokens: mx.array) -> mx.array:
        kinds = _kinds(band)
        inputs = [
            (layer.stops, [layer.lengths(limit) for limit in limits])
            for layer, limits in zip(kinds, self._limits, strict=True)
        ]
        buffers = [layer.state for layer in band.attention]
        call = None if self._routing is None else self._routing.call
        self._band = band
        try:
            own = [] if call is None else [call.own]
            return self._call(tokens, kinds[0].offset, inputs, buffers, own)
        finally:
            self._band = None

    def _traced(
        self,
        tokens: mx.array,
        offset: mx.array,
        kinds: Sequence[tuple[mx.array, Sequence[mx.array]]],
        buffers: Sequence[tuple[mx.array, mx.array]],
        own: Sequence[mx.array],
    ) -> mx.array:
        """The function that is compiled. Every array that changes between steps is an argument.

        Args:
            tokens: ``[rows, 1]``.
            offset: ``[rows]``, the rows' positions.
            kinds: for each kind of layer, the rows' stops and the lengths for each window.
            buffers: keys and values of each layer.
            own: the slots of the rows' adapters, see ``Routing.traced``; empty without adapters.

        Raises:
            ValueError: the model's masks change from step to step.
        """
        assert self._band is not None
        band = self._band
        shared = {
            id(layer.ring): Shared(
                lengths=dict(zip(limits, lengths, strict=True)), stops=stops, traced=True
            )
            for layer, limits, (stops, lengths) in zip(
                _kinds(band), self._limits, kinds, strict=True
            )
        }
        expected = self._limits
        adapters = nullcontext() if self._routing is None else self._routing.traced(*own)
        with _replaced_arrays(band.attention, offset, shared, buffers), adapters:
            logits = self._plain(band, tokens)
        if expected != self._limits:
            raise ValueError("its masks differ from step to step")
        return logits

    def _is_right(self, logits: mx.array, band: BatchCache, tokens: mx.array) -> bool:
        """Whether a plain call gives the same logits.

        Later steps rely on the answer only if it comes from a step after the traced one.
        """
        right = _TRIAL.passes(lambda: self._plain(band, tokens), lambda: logits)
        self._checked = right and self._steady > STEADY
        return right


def _kinds(band: BatchCache) -> list[LayerCache]:
    """One layer of each kind, that is, of each ring."""
    return list({id(layer.ring): layer for layer in reversed(band.attention)}.values())


@contextmanager
def _replaced_arrays(
    layers: Sequence[LayerCache],
    offset: mx.array,
    shared: dict[int, Shared],
    buffers: Sequence[tuple[mx.array, mx.array]],
) -> Iterator[None]:
    """A context in which the layers use these arrays instead of their own."""
    before = [(layer.offset, layer.shared, layer.keys, layer.values) for layer in layers]
    for layer, (keys, values) in zip(layers, buffers, strict=True):
        layer.begin(offset, shared[id(layer.ring)])
        layer.keys, layer.values = keys, values
    try:
        yield
    finally:
        for layer, (layer_offset, layer_shared, *arrays) in zip(layers, before, strict=True):
            layer.begin(layer_offset, layer_shared)
            layer.keys, layer.values = arrays
            layer.end()
