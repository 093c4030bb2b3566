"""Decode steps whose rows stay as they are, compiled.

A step of few rows takes as long as the host needs to build and launch it. What Python and MLX do
for each operation of it is the same from step to step while the shapes are, and is done once then.
For layers that are ``queued`` only: seen from MLX their buffers never change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache, Shared
from chairlift.engine.model.trial import Trial, within_largest

log = logging.getLogger(__name__)

# Steps of the same shape after which it is compiled, which takes as long as three more of them.
STEADY = 8
# Rows above which the device takes longer than the host, compiled or not (measured on an H200).
MOST_ROWS = 64
# Shapes that are remembered.
MOST = 64
# Of the largest logit: fused operations round less often.
TOLERANCE = 0.05
_TRIAL = Trial(
    within_largest(TOLERANCE),
    log,
    error="decode steps are not compiled: %s",
    level=logging.INFO,
    mismatch="compiled decode steps are wrong for this model; they are not used",
)


class CompiledSteps:
    """Calls a model for one band's step of one token a row; each shape's call is compiled."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._call: Callable[..., mx.array] = mx.compile(self._traced)
        self._band: BatchCache | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._last: tuple[Any, ...] = ()
        # What the layers of each kind were asked for in the last plain step: see ``Shared``.
        self._limits: list[list[int | None]] = []
        self._steady = 0
        self._checked = False
        self._gives_up = False

    def __call__(self, band: BatchCache, tokens: mx.array) -> mx.array:
        """
        Args:
            band: in a step of one token.
            tokens: ``[rows, 1]``.

        Returns:
            Logits ``[rows, 1, vocabulary]``.
        """
        if not band.queued or self._gives_up or len(band) > MOST_ROWS:
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
        """A call that is not compiled; notes what the layers are asked for."""
        logits: mx.array = self._model(tokens, cache=band.layers)
        self._limits = [list(layer.shared.lengths) for layer in _kinds(band)]
        return logits

    def _is_steady(self, band: BatchCache) -> bool:
        """Whether a band's shape is compiled, or had better be."""
        shape = (len(band), *(layer.ring.columns for layer in _kinds(band)), band.capacity.rows)
        self._steady = self._steady + 1 if shape == self._last else 0
        self._last = shape
        if shape in self._known:
            return True
        if self._steady < STEADY:
            return False
        if len(self._known) >= MOST:
            self._known.clear()
            self._call = mx.compile(self._traced)
        self._known.add(shape)
        return True

    def _compiled(self, band: BatchCache, tokens: mx.array) -> mx.array:
        kinds = _kinds(band)
        own = [
            (layer.newest, [layer.lengths(limit) for limit in limits])
            for layer, limits in zip(kinds, self._limits, strict=True)
        ]
        buffers = [layer.state for layer in band.attention]
        self._band = band
        try:
            return self._call(tokens, kinds[0].offset, own, buffers)
        finally:
            self._band = None

    def _traced(
        self,
        tokens: mx.array,
        offset: mx.array,
        kinds: Sequence[tuple[mx.array, Sequence[mx.array]]],
        buffers: Sequence[tuple[mx.array, mx.array]],
    ) -> mx.array:
        """What is compiled: of the step there may be nothing in it but what it is given.

        Args:
            tokens: ``[rows, 1]``.
            offset: ``[rows]``.
            kinds: of each kind of layer the newest column, and lengths by what was asked for.
            buffers: keys and values of each layer.
        """
        assert self._band is not None
        band = self._band
        shared = {
            id(layer.ring): Shared(
                lengths=dict(zip(limits, lengths, strict=True)), cursor=cursor, traced=True
            )
            for layer, limits, (cursor, lengths) in zip(
                _kinds(band), self._limits, kinds, strict=True
            )
        }
        known = self._limits
        with _in_place_of(band.attention, offset, shared, buffers):
            logits = self._plain(band, tokens)
        if known != self._limits:
            raise ValueError("its masks differ from step to step")
        return logits

    def _is_right(self, logits: mx.array, band: BatchCache, tokens: mx.array) -> bool:
        """Whether a plain call gives the same, in a later step than the one that was traced."""
        right = _TRIAL.passes(lambda: self._plain(band, tokens), lambda: logits)
        self._checked = right and self._steady > STEADY
        return right


def _kinds(band: BatchCache) -> list[LayerCache]:
    """A layer of each kind."""
    return list({id(layer.ring): layer for layer in reversed(band.attention)}.values())


@contextmanager
def _in_place_of(
    layers: Sequence[LayerCache],
    offset: mx.array,
    shared: dict[int, Shared],
    buffers: Sequence[tuple[mx.array, mx.array]],
) -> Iterator[None]:
    """Layers that have other arrays while inside."""
    before = [(layer.offset, layer.shared, layer.keys, layer.values) for layer in layers]
    for layer, (keys, values) in zip(layers, buffers, strict=True):
        layer.begin(offset, shared[id(layer.ring)])
        layer.keys, layer.values = keys, values
    try:
        yield
    finally:
        for layer, (own, step, *held) in zip(layers, before, strict=True):
            layer.begin(own, step)
            layer.keys, layer.values = held
            layer.end()
