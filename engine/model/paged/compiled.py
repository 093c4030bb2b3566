"""Compiles steps over pages whose shapes recur.

A step of few tokens takes as long as the host needs to build and launch it. While shapes stay the
same, Python and MLX do the same work for each operation in every step; ``mx.compile`` does it only
once. This works only over pages: MLX does not see that their contents change. Rows, tokens and
tables are padded, so that shapes recur while rows join and leave and prompts come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.layer import PagedStep
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.step import KindStep, StepNumbers, TokenArrays
from chairlift.cache.pages.step_parts import PagedAttention, written
from chairlift.cache.pages.upload import Upload
from chairlift.engine.model.lora_routing import Routing
from chairlift.engine.model.trials.trial import Trial, within_rms

log = logging.getLogger(__name__)

# A shape is compiled once it has been seen this many times, unless ``compile`` has done so before.
# Compiling takes as long as three more steps.
STEADY = 8
# The number of compiled shapes that are kept.
MAX_SHAPES = 256
# In at least SHARE of the rows, a compiled step's logits differ from a plain one's by at most
# TOLERANCE of the row's logits. Fused operations round less often, which sends a few tokens to
# other experts; a wrong array would make all rows wrong.
TOLERANCE, SHARE = 0.15, 0.5
_TRIAL = Trial(
    within_rms(TOLERANCE, SHARE),
    log,
    error="steps are not compiled: %s",
    level=logging.INFO,
    mismatch="compiled steps are wrong for this model; they are not used",
)

Shape = tuple[int, ...]
# The tokens whose logits are needed, ``[positions]`` int32; None: all.
Positions = mx.array | None


class ModelCall(Protocol):
    """Calls a model with a step's tokens ``[tokens, 1]`` and the layers of its caches."""

    def __call__(self, tokens: mx.array, layers: Sequence[Any], positions: Positions) -> mx.array:
        """The logits ``[positions, vocabulary]`` of the tokens ``positions``."""
        ...


class StepForm(NamedTuple):
    """A step without its arrays; another one may have the same shape, but other numbers.

    Attributes:
        memory, attention: see ``PagedStep``.
        numbers: those of the step, with the tokens and the positions as ``more``.
        positioned: only some tokens' logits are needed.
    """

    memory: PagedMemory
    attention: PagedAttention
    numbers: StepNumbers
    positioned: bool


class BuiltStep(NamedTuple):
    """A step that was built before its numbers were known.

    Attributes:
        steps: the one that has built it.
        upload: its arrays, which take the numbers.
        step: the step.
        shape: its shape.
        logits: the result.
    """

    steps: CompiledSteps
    upload: Upload
    step: PagedStep
    shape: Shape
    logits: mx.array

    def is_of(self, steps: CompiledSteps, step: PagedStep, positions: Positions) -> bool:
        """Whether this step has been built for ``step``, which has this one's arrays."""
        same = self.step.tokens.arrays.offset is step.tokens.arrays.offset
        return same and self.steps is steps and self.shape == _shape(step, positions)


class CompiledSteps:
    """Calls a model for steps of one kind, with the call compiled for each frequent shape.

    Args:
        call: calls the model.
        routing: the adapters of the tokens; None for steps without adapters.
        wait_dispatched: called before a step that is not only built; see ``Forward``.
    """

    def __init__(
        self,
        call: ModelCall,
        routing: Routing | None = None,
        wait_dispatched: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = call
        self._wait_dispatched = wait_dispatched
        self._routing = routing
        self._call: Callable[..., Any] = mx.compile(self._traced)
        self._step: PagedStep | None = None
        # How often each shape was seen.
        self._seen: dict[Shape, int] = {}
        # The forms of layers whose tiles a step needs; None before the first step.
        self._forms: tuple[Hashable, ...] | None = None
        self._checked = False
        self._gives_up = False
        if routing is not None:
            # Compiled calls contain the adapters' matrices.
            routing.on_change(self._forget)

    def __call__(
        self,
        step: PagedStep,
        tokens: mx.array,
        positions: Positions,
        built: BuiltStep | None = None,
    ) -> mx.array:
        """Computes the logits of a step.

        Args:
            tokens: ``[tokens, 1]``.
            positions: the tokens whose logits are needed.
            built: the step, if it has been built before.

        Returns:
            Logits ``[positions, vocabulary]``.
        """
        if built is not None and built.is_of(self, step, positions):
            step.writes.extend(built.step.writes)
            return built.logits
        if self._gives_up or not self._is_steady(step, positions):
            self._wait_dispatched()
            return self._plain(step, tokens, positions)
        if not self._checked:
            self._wait_dispatched()
        compiled = _TRIAL.attempt(lambda: self._compiled(step, tokens, positions))
        if compiled is not None and (
            self._checked or self._is_right(compiled, step, tokens, positions)
        ):
            return compiled
        self._gives_up = True
        self._wait_dispatched()
        return self._plain(step, tokens, positions)

    def build(self, form: StepForm) -> BuiltStep | None:
        """Builds a step whose numbers are not known yet; None if its shape is not compiled."""
        if not self._checked or self._gives_up or self._routing is not None:
            return None
        upload = Upload(form.numbers.parts, form.memory.host)
        kinds, (tokens, positions) = form.numbers.on_device(upload.arrays)
        own = next(iter(kinds.values())).tokens
        step = PagedStep(form.memory, form.numbers, own, kinds, attention=form.attention)
        needed = positions if form.positioned else None
        shape = _shape(step, needed)
        # Tiles that are not among the numbers would stay those of the other step.
        tiled = set(self._forms or ()) <= own.tiles.keys()
        if self._seen.get(shape, 0) <= STEADY or not tiled:
            upload.drop()
            return None
        logits = self._compiled(step, tokens[:, None], needed)
        return BuiltStep(self, upload, step, shape, logits)

    def compile(self, step: PagedStep, tokens: mx.array, positions: Positions) -> None:
        """Compiles a step's shape in advance, and computes the step; see ``__call__``."""
        if not self._is_ready(step):
            mx.eval(self._plain(step, tokens, positions))
        self._seen[_shape(step, positions)] = STEADY
        for _ in range(1 if self._checked else 2):
            mx.eval(self(step, tokens, positions))

    def _plain(self, step: PagedStep, tokens: mx.array, positions: Positions) -> mx.array:
        logits = self._model(tokens, step.layers(), positions)
        self._forms = tuple(step.tokens.tiles)
        return logits

    def _is_ready(self, step: PagedStep) -> bool:
        """Whether a step can be compiled: what is made at first use is there."""
        memory = step.memory
        allocated = all(layer.buffers is not None for layer in memory.layers)
        recurs = step.parts is None or step.parts.recur
        return allocated and recurs and self._forms is not None

    def _is_steady(self, step: PagedStep, positions: Positions) -> bool:
        """Counts a step's shape, and returns whether it has been seen often enough."""
        shape = _shape(step, positions)
        if shape not in self._seen and len(self._seen) >= MAX_SHAPES:
            self._forget()
        self._seen[shape] = self._seen.get(shape, 0) + 1
        return self._seen[shape] > STEADY and self._is_ready(step)

    def _forget(self) -> None:
        self._seen.clear()
        self._call = mx.compile(self._traced)

    def _compiled(self, step: PagedStep, tokens: mx.array, positions: Positions) -> mx.array:
        forms = self._forms or ()
        tiler = step.memory.kernels.tile_table
        tiles = [step.tokens.tiles_of(form, tiler).array for form in forms]
        call = None if self._routing is None else self._routing.call
        states = step.parts.arrays() if step.parts else []
        self._step = step
        try:
            logits, after, writes = self._call(
                _shape(step, positions),
                tokens,
                [] if positions is None else [positions],
                list(step.tokens.arrays),
                tiles,
                [kind.pages for kind in step.kinds.values()],
                [layer.buffers for layer in step.memory.layers],
                [] if call is None else [call.own],
                states,
            )
        finally:
            self._step = None
        if step.parts:
            step.parts.take(after)
        step.writes.extend(writes)
        result: mx.array = logits
        return result

    def _traced(
        self,
        shape: Shape,
        tokens: mx.array,
        positions: Sequence[mx.array],
        arrays: Sequence[mx.array],
        tiles: Sequence[mx.array],
        tables: Sequence[mx.array],
        buffers: Sequence[Sequence[mx.array]],
        slots: Sequence[mx.array],
        states: Sequence[Sequence[mx.array]],
    ) -> tuple[mx.array, list[list[mx.array]], list[mx.array]]:
        """The function that is compiled. Every array that changes between steps is an argument.

        Args:
            shape: makes MLX trace each shape of a step, also if all arrays have the same sizes.
            tokens: ``[tokens, 1]``.
            positions: the tokens whose logits are needed; empty: all.
            arrays: ``TokenArrays``.
            tiles: those of each form of layers.
            tables: the page table of each kind.
            buffers: keys and values of each layer.
            slots: the slots of the tokens' adapters, see ``Routing.traced``; empty without
                adapters.
            states: those of recurrent layers, see ``StepParts.arrays``.

        Returns:
            Logits, the states after the step, and ``PagedStep.writes``.
        """
        assert self._step is not None
        step = self._step
        own_tiles = dict(zip(self._forms or (), tiles, strict=True))
        own = step.tokens.with_arrays(TokenArrays(*arrays), own_tiles)
        kinds = dict(zip(step.kinds, (KindStep(own, table) for table in tables), strict=True))
        traced = PagedStep(
            *(step.memory, step.numbers, own, kinds),
            parts=step.parts,
            attention=step.attention,
            traced=True,
        )
        adapters = nullcontext() if self._routing is None else self._routing.traced(*slots)
        with adapters, traced.running():
            recurrent = step.parts.traced(states) if step.parts else []
            layers = traced.layers([KeysValues(*pair) for pair in buffers], recurrent)
            logits = self._model(tokens, layers, positions[0] if positions else None)
            writes = list(traced.writes)
            traced.writes.clear()
        step.memory.effects = []
        return logits, written(recurrent), writes

    def _is_right(
        self, logits: mx.array, step: PagedStep, tokens: mx.array, positions: Positions
    ) -> bool:
        """Whether a plain call gives the same logits.

        Later steps rely on the answer only if it comes from a step after the traced one.
        """
        # One after the other: in one graph, both would run at the same time on the same pages.
        mx.eval(logits)
        right = _TRIAL.passes(lambda: self._plain(step, tokens, positions), lambda: logits)
        self._checked = right and self._seen[_shape(step, positions)] > STEADY + 1
        return right


def _shape(step: PagedStep, positions: Positions) -> Shape:
    """The numbers that decide which kernels a step launches."""
    tokens, sizes = step.tokens, step.tokens.sizes
    count = tokens.arrays.offset.size
    needed = count if positions is None else positions.size
    limits = sizes.row_limit, sizes.chunk_limit, sizes.column_limit
    entries = (kind.pages.size for kind in step.kinds.values())
    return (count, needed, int(bool(tokens.chunks)), *limits, *entries)
