"""Adds the steps of attention to a layer's cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.packed.host_step import host_step
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer, attend_on_host
from chairlift.engine.cpu.compiled.jobs import NoProgramError, Program
from chairlift.engine.cpu.compiled.row_attention import AttentionJobs
from chairlift.engine.cpu.decoder.layer import is_plain
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.graph.graph import Array, NoGraphError
from chairlift.engine.cpu.graph.lowering import LayerCall, Lowering
from chairlift.engine.cpu.host_attention import RowScores
from chairlift.engine.cpu.views import view
from chairlift.engine.model.attention import Attention


def lower_attention(
    lowering: Lowering, operation: Attention, inputs: list[Array], shape: tuple[int, ...]
) -> Array:
    """Adds the steps of attention, and returns ``[tokens, heads, 1, value dim]``.

    Args:
        inputs: queries, keys and values ``[tokens, heads, 1, dim]``, and perhaps sinks ``[heads]``.
            There are no keys and values (of no tokens) if another layer has written them.

    Raises:
        NoGraphError: the arrays have several tokens for each row.
    """
    queries, keys, values, *more = inputs
    if any(each.shape[2] != 1 for each in (queries, keys, values)):
        raise NoGraphError("several tokens of a row")
    packed = [lowering.heads(each[:, :, 0]) for each in (queries, keys, values)]
    mixed: Floats = lowering.new((shape[0], shape[1], shape[3]))
    sinks = np.ascontiguousarray(more[0], np.float32) if more else None
    step = _AttentionStep(lowering, operation, packed, mixed, sinks)
    lowering.then(step)
    return mixed[:, :, None]


class _AttentionStep:
    """Writes keys and values to a layer's cache, and attends to it."""

    def __init__(
        self,
        lowering: Lowering,
        operation: Attention,
        arrays: list[Floats],
        mixed: Floats,
        sinks: Floats | None,
    ) -> None:
        self._arrays, self._mixed, self._sinks = arrays, mixed, sinks
        self._operation = operation
        more = sinks, operation.softcap
        self._scores = RowScores(operation.scale, *more)
        self._program = Program()
        self._jobs: AttentionJobs | None = None
        if arrays[2].shape == arrays[1].shape:
            scaled = lowering.new(arrays[0].shape)
            with suppress(NoProgramError):
                queries, keys, values = arrays
                memory = queries, keys, values, scaled, mixed
                self._jobs = AttentionJobs(self._program, *memory, operation.scale, *more)

    def __call__(self, call: LayerCall) -> None:
        """Computes attention by compiled functions, in NumPy or by the model's own function."""
        cache, mask = call.cache, call.mask
        function = self._operation.function
        if function is not None and not (is_plain(cache) and _fits(cache, mask)):
            self._by_function(function, cache, mask)
            return
        if self._jobs is not None:
            step = host_step(cache, mask)
            if step is not None and self._jobs.point(step):
                self._program.run()
                return
        arguments = *self._arrays, mask, self._scores
        if isinstance(cache, PackedLayer):
            self._mixed[...] = cache.attend_on_host(*arguments)
        else:
            self._mixed[...] = attend_on_host(cache, *arguments)

    def _by_function(self, function: Callable[..., mx.array], cache: Any, mask: Any) -> None:
        queries, keys, values = (mx.array(each[:, :, None]) for each in self._arrays)
        read = cache.update_and_fetch(keys, values) if len(keys) else cache.keys_and_values()
        sinks = None if self._sinks is None else mx.array(self._sinks)
        result = function(
            queries, *read, cache=cache, scale=self._operation.scale, mask=mask, sinks=sinks
        )
        self._mixed[...] = view(result)[:, :, 0]


def _fits(cache: Any, mask: Any) -> bool:
    """Whether a mask is of the form that belongs to a cache."""
    if isinstance(cache, PackedLayer):
        return isinstance(mask, PackedMask)
    return mask is None or isinstance(mask, mx.array)
