"""Compiles decode steps over pages whose shapes recur.

A step of few rows takes as long as the host needs to build and launch it. While shapes stay the
same, Python and MLX do the same work for each operation in every step; ``mx.compile`` does it only
once. This works only over pages: MLX does not see that their contents change. The number of rows is
padded, so that shapes recur while rows join and leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.layer import PagedStep
from chairlift.cache.pages.step import KindStep, StepTokens
from chairlift.engine.model.lora_routing import Routing
from chairlift.engine.model.trials.trial import Trial, within_rms

log = logging.getLogger(__name__)

# A shape is compiled once it has been seen this many times, unless ``compile`` has done so before.
# Compiling takes as long as three more steps.
STEADY = 8
# The number of compiled shapes that are kept.
MAX_SHAPES = 256
# As a share of a row's logits, in so many of the rows. Fused operations round less often, which
# sends a few tokens to other experts; a wrong array would make all rows wrong.
TOLERANCE, SHARE = 0.15, 0.5
_TRIAL = Trial(
    within_rms(TOLERANCE, SHARE),
    log,
    error="decode steps are not compiled: %s",
    level=logging.INFO,
    mismatch="compiled decode steps are wrong for this model; they are not used",
)

Shape = tuple[int, ...]


class CompiledSteps:
    """Calls a model for decode steps, with the call compiled for each frequent shape.

    Args:
        routing: the adapters of the rows; None for steps without adapters.
    """

    def __init__(self, model: Any, routing: Routing | None = None) -> None:
        self._model = model
        self._routing = routing
        self._call: Callable[..., mx.array] = mx.compile(self._traced)
        self._step: PagedStep | None = None
        # How often each shape was seen.
        self._seen: dict[Shape, int] = {}
        self._checked = False
        self._gives_up = False
        if routing is not None:
            # Compiled calls contain the adapters' matrices.
            routing.on_change(self._forget)

    def __call__(self, step: PagedStep, tokens: mx.array) -> mx.array:
        """Computes the next logits of a decode step.

        Args:
            step: has rows only.
            tokens: ``[tokens, 1]``.

        Returns:
            Logits ``[tokens, 1, vocabulary]``.
        """
        if self._gives_up or not self._is_steady(step):
            return self._plain(step, tokens)
        compiled = _TRIAL.attempt(lambda: self._compiled(step, tokens))
        if compiled is not None and (self._checked or self._is_right(compiled, step, tokens)):
            return compiled
        self._gives_up = True
        return self._plain(step, tokens)

    def compile(self, step: PagedStep, tokens: mx.array) -> None:
        """Compiles a step's shape in advance, and computes the step; see ``__call__``."""
        if not _allocated(step):
            mx.eval(self._plain(step, tokens))
        self._seen[_shape(step)] = STEADY
        for _ in range(1 if self._checked else 2):
            mx.eval(self(step, tokens))

    def _plain(self, step: PagedStep, tokens: mx.array) -> mx.array:
        logits: mx.array = self._model(tokens, cache=step.layers())
        return logits

    def _is_steady(self, step: PagedStep) -> bool:
        """Counts a step's shape, and returns whether it has been seen often enough."""
        shape = _shape(step)
        if shape not in self._seen and len(self._seen) >= MAX_SHAPES:
            self._forget()
        self._seen[shape] = self._seen.get(shape, 0) + 1
        return self._seen[shape] > STEADY and _allocated(step)

    def _forget(self) -> None:
        self._seen.clear()
        self._call = mx.compile(self._traced)

    def _compiled(self, step: PagedStep, tokens: mx.array) -> mx.array:
        own = step.tokens
        tables = [kind.tables for kind in step.kinds.values()]
        buffers = [layer.buffers for layer in step.memory.layers]
        call = None if self._routing is None else self._routing.call
        slots = [] if call is None else [call.own]
        self._step = step
        try:
            arrays = (own.offset, own.owners, own.begins, own.stops)
            return self._call(tokens, arrays, tables, buffers, slots)
        finally:
            self._step = None

    def _traced(
        self,
        tokens: mx.array,
        arrays: tuple[mx.array, mx.array, mx.array, mx.array],
        tables: Sequence[mx.array],
        buffers: Sequence[Sequence[mx.array]],
        slots: Sequence[mx.array],
    ) -> mx.array:
        """The function that is compiled. Every array that changes between steps is an argument.

        Args:
            tokens: ``[rows, 1]``.
            arrays: those of ``StepTokens``.
            tables: the tables of each kind.
            buffers: keys and values of each layer.
            slots: the slots of the rows' adapters, see ``Routing.traced``; empty without adapters.
        """
        assert self._step is not None
        step = self._step
        own = StepTokens(step.tokens.rows, *arrays)
        kinds = dict(zip(step.kinds, (KindStep(own, table) for table in tables), strict=True))
        traced = PagedStep(step.memory, own, kinds, traced=True)
        adapters = nullcontext() if self._routing is None else self._routing.traced(*slots)
        with adapters, traced.running():
            logits: mx.array = self._model(
                tokens, cache=traced.layers([KeysValues(*pair) for pair in buffers])
            )
        step.memory.effects = []
        return logits

    def _is_right(self, logits: mx.array, step: PagedStep, tokens: mx.array) -> bool:
        """Whether a plain call gives the same logits.

        Later steps rely on the answer only if it comes from a step after the traced one.
        """
        # One after the other: in one graph, both would run at the same time on the same pages.
        mx.eval(logits)
        right = _TRIAL.passes(lambda: self._plain(step, tokens), lambda: logits)
        self._checked = right and self._seen[_shape(step)] > STEADY + 1
        return right


def _allocated(step: PagedStep) -> bool:
    return all(layer.buffers is not None for layer in step.memory.layers)


def _shape(step: PagedStep) -> Shape:
    """The numbers that decide which kernels a step launches."""
    sizes = [size for kind in step.kinds.values() for size in kind.tables.shape]
    return (step.tokens.offset.size, *sizes)
