"""Kernels over pages in NumPy and MLX, for tests on the CPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.kernels import KeysValues, Scoring
from chairlift.cache.pages.page import PAGE_TOKENS, page_count
from chairlift.cache.pages.step import ChunkPlace, KindStep, StepSizes, TileTable
from chairlift.cache.pages.upload import Numbers
from chairlift.cache.quantized import Quantization


def memory_of(*arrays: mx.array) -> list[np.ndarray[Any, Any]]:
    """The arrays' own memory, once everything that reads them has run, as on the device."""
    mx.eval(arrays)
    mx.synchronize()
    return [np.array(array, copy=False) for array in arrays]


class HostPages:
    """Writes pages in place.

    Args:
        traceable: steps can be compiled; then they write nothing, which only tests that compare
            compiled steps with others may allow.

    Attributes:
        traces: the number of tokens of each call that was traced.
    """

    def __init__(self, traceable: bool = False) -> None:
        self.traceable = traceable
        self.traces: list[int] = []

    def attend(
        self,
        queries: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scoring: Scoring,
        quantization: Quantization | None,
    ) -> mx.array:
        keys, values, seen = self._fetched(new, buffers, step, scoring.window, quantization)
        mask, scale, cap = seen[:, None, None], scoring.scale, scoring.softcap
        if cap is None:
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=scoring.sinks
            )
        assert scoring.sinks is None
        group = queries.shape[1] // keys.shape[1]
        keys, values = (mx.repeat(array, group, axis=1) for array in (keys, values))
        scores = cap * mx.tanh(scale / cap * (queries @ keys.swapaxes(2, 3)))
        return mx.softmax(mx.where(mask, scores, -mx.inf), axis=-1) @ values

    def attend_latent(
        self,
        queries: mx.array,
        rotary: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scale: float,
    ) -> mx.array:
        latents, keys, seen = self._fetched(new, buffers, step, None, None)
        latents = mx.where(seen[:, None, :, None], latents, 0)
        scores = scale * (queries @ latents.swapaxes(2, 3)) + rotary @ keys.swapaxes(2, 3)
        scores = mx.where(seen[:, None, None], scores, -mx.inf)
        return mx.softmax(scores, axis=-1) @ latents

    def _fetched(
        self,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        window: int | None,
        quantization: Quantization | None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Writes a step's tokens.

        Returns:
            All keys and values of each token's sequence, ``[tokens, key heads, columns, dim]``, and
            which columns the token sees, ``[tokens, columns]``.
        """
        stored = KeysValues(*map(quantization.pack, new)) if quantization else new
        tokens, arrays, table = step.tokens, step.tokens.arrays, step.pages
        owners = arrays.owners
        if tokens.chunks:
            owners = tokens.tiles_of(window, self.tile_table).array
        longest = page_count(tokens.sizes.column_limit)
        gathered: list[mx.array] = []
        try:
            stops, numbers, pages, *memory = memory_of(
                arrays.stops, owners, table, *buffers, *stored
            )
            longest = page_count(int(stops.max()))
            positions = stops - 1
            slots = pages[pages[numbers] + positions // PAGE_TOKENS], positions % PAGE_TOKENS
            for buffer, array in zip(memory[: len(buffers)], memory[len(buffers) :], strict=True):
                buffer[slots[0], :, slots[1]] = array[:, :, 0]
                # A copy: lazy operations must not see what the next step writes.
                gathered.append(mx.array(_gathered(buffer, _pages_of(np, pages, numbers, longest))))
        except (ValueError, RuntimeError):  # while a step is traced, there are no numbers
            if not self.traceable:
                raise
            self.traces.append(new.keys.shape[0])
            positions = arrays.stops - 1
            places = table[table[owners] + positions // PAGE_TOKENS]
            for buffer, array in zip(buffers, stored, strict=True):
                changed = mx.array(buffer)
                changed[places, :, positions % PAGE_TOKENS] = array[:, :, 0]
                gathered.append(_gathered(changed, _pages_of(mx, table, owners, longest)))
        keys, values = gathered
        if quantization:
            keys, values = (
                quantization.unpack(packed, array.shape[3], array.dtype)
                for packed, array in zip((keys, values), new, strict=True)
            )
        column = mx.arange(keys.shape[2])
        stops = arrays.stops[:, None]
        seen = (column < stops) & (column >= stops - step.lengths(window)[:, None])
        # Columns that are not seen may contain anything: the mask replaces their scores, but NaN
        # times a weight of 0 would be NaN.
        values = mx.where(seen[:, None, :, None], values, 0)
        return keys, values, seen

    def tile_table(
        self, chunks: Sequence[ChunkPlace], sizes: StepSizes, form: Hashable
    ) -> TileTable:
        """The owners, so that tiles of another step give wrong results."""
        unused = max([sizes.rows - 1, *(chunk.sequence for chunk in chunks)]) + 1
        owners = np.full(sizes.tokens, unused, np.int32)
        owners[: sizes.rows] = np.arange(sizes.rows)
        for chunk in chunks:
            if chunk.token >= sizes.rows:
                owners[chunk.token : chunk.token + chunk.tokens] = chunk.sequence
        return TileTable(owners, 0)

    def place(self, numbers: Numbers) -> None:
        """The host's memory is the device's."""

    def put(self, buffers: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
        try:
            where, *memory = memory_of(slots, *buffers, *map(mx.contiguous, new))
        except (ValueError, RuntimeError):  # while a step is traced, there are no numbers
            if not self.traceable:
                raise
            return mx.zeros((1,), mx.int32)
        for buffer, array in zip(memory[: len(buffers)], memory[len(buffers) :], strict=True):
            buffer[where // PAGE_TOKENS, :, where % PAGE_TOKENS] = array[0].swapaxes(0, 1)
        return mx.array([1])

    def copy(self, buffers: KeysValues, pairs: mx.array) -> mx.array:
        (source, target), *memory = (array.T for array in memory_of(pairs, *buffers))
        for buffer in memory:
            buffer[..., target] = buffer[..., source]
        return mx.array([1])


def _pages_of(library: Any, table: Any, owners: Any, count: int) -> Any:
    """The first ``count`` pages of each token's sequence; any numbers where it has none."""
    entries = table[owners][:, None] + library.arange(count)
    return table[library.clip(entries, 0, table.size - 1)]


def _gathered(buffer: Any, tables: Any) -> Any:
    """Each sequence's columns: ``[sequences, key heads, columns, dim]``, of MLX or NumPy."""
    sequences, width = tables.shape
    _, heads, _, dim = buffer.shape
    # Where a sequence has no page, its entry is any number.
    pages = buffer[tables % len(buffer)].swapaxes(1, 2)
    return pages.reshape(sequences, heads, width * PAGE_TOKENS, dim)
