"""Attention over pages for model files that compute it by themselves.

Some mask the scores in their own way, or multiply them by something else first; multi-head latent
attention adds a part of its scores as a mask. Their layers are called part by part (see
``cache.packed.split``) with a cache that copies the rows' keys and values out of the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.packed.split import Joint, PackedMask, Places, SplitLayer, SplitPart, Within
from chairlift.cache.pages.buffers import LayerPages
from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS, page_count, seen_window
from chairlift.cache.pages.step import KindStep


class DenseStep(NamedTuple):
    """The data that all dense layers of a step share.

    Attributes:
        offset: ``[tokens]`` int32, the position of each token.
        writes: gets an array for each write that is ready once it is done.
        traced: the step is being compiled.
        grouped_masks: see ``BatchCache``.
        joint, within: see ``SplitLayer``.
    """

    offset: mx.array
    writes: list[mx.array]
    traced: bool
    grouped_masks: bool
    joint: Joint
    within: Callable[[], Within]


@dataclass(frozen=True)
class DenseRows:
    """The places of some rows' tokens, for all layers of a kind.

    Attributes:
        places: the rows' new tokens.
        offset: ``[rows]`` int32, the position of the first new one.
        pages: ``[rows, pages]`` int32, the numbers of the pages that the rows see; behind them any.
        columns: ``[rows, 1, pages * PAGE_TOKENS]`` int32, the position of each token in them.
        stops: ``[rows, 1, 1]`` int32, the position after the last new token.
        slots: ``[new tokens]`` int32, where each new token is written, see ``PageKernels.put``.
    """

    places: Places
    offset: mx.array
    pages: mx.array
    columns: mx.array
    stops: mx.array
    slots: mx.array

    @classmethod
    def of(cls, places: Places, kind: KindStep, window: int | None, columns: int) -> DenseRows:
        """The rows of a step.

        Args:
            window: that of the kind.
            columns: an upper bound of the rows' tokens, the new ones included.
        """
        arrays, table = kind.tokens.arrays, kind.pages
        firsts, lasts, numbers = _rows_of(places)
        begins = arrays.begins[firsts]
        count = page_count(columns)
        first = mx.zeros_like(begins)
        if window is not None:
            first = mx.maximum(begins - (window - 1), 0) // PAGE_TOKENS
            count = min(count, page_count(window + places.length) + 1)
        number = first[:, None] + mx.arange(count)
        entries = mx.minimum(table[arrays.owners[firsts]][:, None] + number, table.size - 1)
        positions = arrays.offset[numbers]
        own = table[table[arrays.owners[numbers]] + positions // PAGE_TOKENS]
        column = number[:, :, None] * PAGE_TOKENS + mx.arange(PAGE_TOKENS)
        return cls(
            places,
            begins,
            table[entries],
            column.reshape(places.rows, 1, -1),
            arrays.stops[lasts][:, None, None],
            own * PAGE_TOKENS + positions % PAGE_TOKENS,
        )

    @cached_property
    def held(self) -> mx.array:
        """Whether each column has a token, the new ones included: ``[rows, 1, columns, 1]``."""
        return (self.columns < self.stops)[..., None]

    @cached_property
    def newest(self) -> mx.array:
        """Whether each column has its row's last token; the shape is that of ``held``."""
        return (self.columns == self.stops - 1)[..., None]

    def mask(self, window: int | None) -> mx.array:
        """Whether each token sees each column: ``[rows, 1, length, columns]``."""
        position = (self.offset[:, None] + mx.arange(self.places.length))[:, :, None]
        seen = self.columns <= position
        if window is not None:
            seen &= self.columns > position - window
        return seen[:, None]


class DenseCache:
    """One layer's cache for the call of some rows, behind mlx-lm's protocol.

    Attributes:
        offset: see ``DenseRows``.
        max_size: the window in tokens, None for full attention.
        keys, values: the last result of ``update_and_fetch``.
    """

    keys: mx.array
    values: mx.array

    def __init__(
        self,
        step: DenseStep,
        rows: DenseRows,
        layer: LayerPages,
        buffers: KeysValues | None,
    ) -> None:
        self._step = step
        self._rows = rows
        self._layer = layer
        self._buffers = buffers
        self.offset = rows.offset
        self.max_size = layer.pool.window

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Arrays to evaluate with a call's result: none; ``DenseStep.writes`` has its writes."""
        return ()

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """The mask of the rows' new tokens; always an array.

        Raises:
            ValueError: see ``seen_window``.
        """
        mask = self._rows.mask(seen_window(window_size, self.max_size))
        return mask[:, :, None] if self._step.grouped_masks else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes new tokens ``[rows, key heads, length, dim]`` to the pages.

        Returns:
            All keys and values that the rows see, ``[rows, key heads, columns, dim]``; zeros where
            there is no token.
        """
        rows, layer = self._rows, self._layer
        packed = KeysValues(*(_packed(array, rows.places) for array in (keys, values)))
        buffers = self._buffers or layer.buffers_for(packed)
        stored = packed
        if layer.quantization is not None:
            stored = KeysValues(*map(layer.quantization.pack, packed))
        joined = KeysValues(*(array[:, :, 0].swapaxes(0, 1)[None] for array in stored))
        done = layer.kernels.put(buffers, joined, rows.slots)
        self._step.writes.append(done)
        # A number that is 0, so that the pages are read after they are written.
        after = mx.minimum(mx.maximum(done, 0), 0).astype(mx.int32)
        fetched = []
        for buffer, new in zip(buffers, (keys, values), strict=True):
            pages = buffer[rows.pages + after].swapaxes(1, 2)
            dense = pages.reshape(*pages.shape[:2], rows.columns.shape[2], pages.shape[4])
            if (quantization := layer.quantization) is not None:
                dense = quantization.unpack(dense, new.shape[3], new.dtype)
            if rows.places.length == 1:
                # Unused tokens have one place in common, but not one result.
                own = new
                if quantization is not None:
                    own = quantization.unpack(quantization.pack(new), new.shape[3], new.dtype)
                dense = mx.where(rows.newest, own, dense)
            # Memory without a token may contain anything, and NaN times a weight of 0 is NaN.
            fetched.append(mx.where(rows.held, dense, 0))
        self.keys, self.values = fetched
        return fetched[0], fetched[1]


class DenseLayer(SplitLayer):
    """One attention layer's cache in a step; the model's layer is called part by part.

    Attributes:
        offset: ``[tokens]`` int32, the position of each token.
        max_size: the window in tokens, None for full attention.
    """

    def __init__(
        self,
        step: DenseStep,
        rows: Sequence[DenseRows],
        layer: LayerPages,
        buffers: KeysValues | None,
    ) -> None:
        caches = [DenseCache(step, own, layer, buffers) for own in rows]
        parts = [SplitPart(own.places, cache) for own, cache in zip(rows, caches, strict=True)]
        super().__init__(parts, step.joint, step.within, launches=not step.traced)
        self.offset = step.offset
        self.max_size = layer.pool.window

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> PackedMask:
        """The masks of all parts."""
        return PackedMask([part.cache.make_mask(n, window_size) for part in self.parts])


def _packed(array: mx.array, places: Places) -> mx.array:
    """``[rows, heads, length, dim]`` as ``[new tokens, heads, 1, dim]``, without padding."""
    rows, heads, length, dim = array.shape
    tokens = array.swapaxes(1, 2).reshape(rows * length, heads, 1, dim)
    return places.unpadded(tokens)


def _rows_of(places: Places) -> tuple[mx.array | slice, mx.array | slice, mx.array | slice]:
    """The numbers of each row's first token and of its last one, and those of all tokens."""
    if places.span is not None and places.own is not None and 1 in (places.rows, places.length):
        start, stop, count = places.span.start, places.span.stop, len(places.numbers)
        own = slice(start + places.own.start, start + places.own.start + count)
        if places.length == 1:
            return places.span, places.span, own
        return slice(start, start + 1), slice(stop - 1, stop), own
    by_row = places.tokens.reshape(places.rows, places.length)
    return mx.array(by_row[:, 0]), mx.array(by_row[:, -1]), mx.array(places.numbers)
