"""Adds the steps of attention to a layer's cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.packed.host_attend import HostAttend
from chairlift.cache.packed.host_step import host_step
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer, attend_on_host
from chairlift.engine.cpu.attention.layer import LatentScores, RowScores
from chairlift.engine.cpu.compiled.jobs import NoProgramError, Program
from chairlift.engine.cpu.compiled.row_attention import AttentionJobs
from chairlift.engine.cpu.decoder.layer import is_plain
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.graph.graph import Array, NoGraphError
from chairlift.engine.cpu.graph.lowering import LayerCall, Lowering
from chairlift.engine.cpu.views import view
from chairlift.engine.model.attention import Attention, LatentAttention


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
    arrays = (
        lowering.heads(queries[:, :, 0]),
        lowering.heads(keys[:, :, 0]),
        lowering.heads(values[:, :, 0]),
    )
    mixed: Floats = lowering.new((shape[0], shape[1], shape[3]))
    sinks = np.ascontiguousarray(more[0], np.float32) if more else None
    lowering.then(_AttentionStep(lowering, operation, arrays, mixed, sinks))
    return mixed[:, :, None]


def lower_latent_attention(
    lowering: Lowering, operation: LatentAttention, inputs: list[Array], shape: tuple[int, ...]
) -> Array:
    """Adds the steps of multi-head latent attention, and returns ``[tokens, heads, 1, latent]``.

    Args:
        inputs: queries, latents, rotary queries that are multiplied by the scale, and rotary keys,
            ``[tokens, heads, 1, dim]``.

    Raises:
        NoGraphError: the arrays have another form.
    """
    queries, latents, rotary, keys = (each[:, :, 0] for each in inputs)
    dim, tokens = keys.shape[2], shape[0]
    one_head = (tokens, 1)
    if any(each.shape[2] != 1 for each in inputs) or rotary.shape != (*queries.shape[:2], dim):
        raise NoGraphError("several tokens of a row, or another form of latent attention")
    if latents.shape[:2] != one_head or keys.shape[:2] != one_head:
        raise NoGraphError("latents of several heads")
    both = lowering.new((*queries.shape[:2], dim + queries.shape[2]))
    scale = np.full((1, 1, 1), operation.scale, np.float32)
    lowering.copy(rotary, both[..., :dim])
    factors = np.broadcast_to(scale, queries.shape)
    lowering.write("Multiply", [], [queries, factors], both[..., dim:])
    lowering.kept.append(scale)
    mixed: Floats = lowering.new((*shape[:2], shape[3]))
    arrays = both, lowering.heads(latents), lowering.heads(keys)
    lowering.then(_ColumnsStep(arrays, both, mixed, 1.0, LatentScores()))
    return mixed[:, :, None]


class _ColumnsStep:
    """Writes keys and values to a layer's cache, and attends to it.

    Args:
        arrays: queries, keys and values, ``[tokens, heads, dim]``.
        scaled, sinks, softcap: see ``AttentionJobs``.
        mixed: memory for the result.
        scores: computes the same in NumPy.
    """

    def __init__(
        self,
        arrays: tuple[Floats, Floats, Floats],
        scaled: Floats,
        mixed: Floats,
        scale: float,
        scores: HostAttend,
        sinks: Floats | None = None,
        softcap: float | None = None,
    ) -> None:
        self._arrays, self._mixed, self._scores = arrays, mixed, scores
        self._program = Program()
        self._jobs: AttentionJobs | None = None
        more = sinks, softcap
        with suppress(NoProgramError):
            self._jobs = AttentionJobs(self._program, *arrays, scaled, mixed, scale, *more)

    def __call__(self, call: LayerCall) -> None:
        """Computes attention by compiled functions or in NumPy."""
        cache, mask = call.cache, call.mask
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


class _AttentionStep:
    """Attends to a layer's cache in its columns, or by the model's own function."""

    def __init__(
        self,
        lowering: Lowering,
        operation: Attention,
        arrays: tuple[Floats, Floats, Floats],
        mixed: Floats,
        sinks: Floats | None,
    ) -> None:
        self._arrays, self._mixed, self._sinks = arrays, mixed, sinks
        self._operation, more = operation, (sinks, operation.softcap)
        scaled, scores = lowering.new(arrays[0].shape), RowScores(operation.scale, *more)
        self._in_columns = _ColumnsStep(arrays, scaled, mixed, operation.scale, scores, *more)

    def __call__(self, call: LayerCall) -> None:
        """Computes attention."""
        function = self._operation.function
        if function is None or (is_plain(call.cache) and _fits(call.cache, call.mask)):
            self._in_columns(call)
        else:
            self._by_function(function, call.cache, call.mask)

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
