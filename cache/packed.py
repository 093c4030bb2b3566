"""Runs several batches in one model call: the model sees every new token as a row.

A decode step has one token for each of many rows, or a few with a draft, and a prompt's chunk many
tokens of one row. Packed as ``[tokens, 1]``, they share each product with the weights, and no row
is padded. Only attention has to separate the batches: each batch's layer writes its tokens to its
own buffers, and each part attends to its own keys. Packing is impossible if the model's attention
does not go through ``attend``, or if any other operation mixes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache, Mask

Floats = NDArray[np.float32]
Array = TypeVar("Array", mx.array, Floats)


class Part(NamedTuple):
    """The attention inputs of one batch's layer.

    Attributes:
        layer: the batch's layer.
        queries: ``[rows, heads, step, dim]``.
        keys: ``[rows, key heads, columns, dim]``.
        values: as ``keys``; the last dimension may differ.
        mask: the mask of this batch.
    """

    layer: LayerCache
    queries: mx.array
    keys: mx.array
    values: mx.array
    mask: Mask


class PackedMask(NamedTuple):
    """The masks of all parts; a model only passes it on."""

    masks: list[Mask]


class BatchStep(NamedTuple):
    """One batch's share of a step.

    Attributes:
        batch: the batch.
        tokens: new tokens of each row, padding included.
        real: how many of them are actual tokens; padding follows (see ``BatchCache.step``).
        begin: a context in which each row takes a number of columns, of which so many are actual
            tokens: ``batch.step``, or that of a transaction.
    """

    batch: BatchCache
    tokens: Sequence[int]
    real: Sequence[int]
    begin: Callable[[int, Sequence[int]], AbstractContextManager[None]]

    @property
    def columns(self) -> int:
        """The columns that each row takes."""
        return max(self.tokens)

    @property
    def positions(self) -> list[int]:
        """The position of each token in its sequence."""
        rows = zip(self.batch.offsets, self.tokens, strict=True)
        return [offset + i for offset, count in rows for i in range(count)]

    def ragged(self) -> _Ragged | None:
        """How to lay out rows with different numbers of tokens; None if all have the same."""
        columns = self.columns
        if min(self.tokens) == columns:
            return None
        ends = np.cumsum(self.tokens)
        begins = ends - np.array(self.tokens)
        column = np.arange(columns)
        places = np.minimum(begins[:, None] + column, ends[:, None] - 1)
        taken = column < np.array(self.tokens)[:, None]
        tokens, columns_of = places.reshape(-1), np.flatnonzero(taken)
        return _Ragged(mx.array(tokens), mx.array(columns_of), tokens, columns_of)


class _Ragged(NamedTuple):
    """Rows with different numbers of tokens, padded to the same number of columns.

    Attributes:
        tokens: ``[rows * columns]``, the token that is in each column; padding repeats the row's
            last token.
        columns: ``[tokens]``, the column, counted over all rows, of each token.
        host_tokens, host_columns: the same for NumPy.
    """

    tokens: mx.array
    columns: mx.array
    host_tokens: NDArray[np.intp]
    host_columns: NDArray[np.intp]


class _Place(NamedTuple):
    """A layer's range ``[start, stop)`` of the packed tokens.

    Each of its rows has ``counts`` of them, and takes ``step`` columns; ``ragged`` if some have
    fewer tokens.
    """

    layer: LayerCache
    start: int
    stop: int
    counts: Sequence[int]
    step: int
    ragged: _Ragged | None


class HostAttend(Protocol):
    """Attention in NumPy."""

    def by_row(
        self,
        queries: Floats,
        keys: mx.array,
        values: mx.array,
        counts: Sequence[int],
        begun: Sequence[int],
    ) -> Floats | None:
        """Attention of each row's new tokens to all columns of the row up to their own.

        Args:
            queries: ``[tokens, heads, dim]``, row by row.
            keys, values: ``[rows, key heads, columns, dim]``.
            counts: the new tokens of each row.
            begun: the columns of each row before its new tokens.

        Returns:
            ``[tokens, heads, value dim]``; None if heads of this form are not supported.
        """
        ...

    def masked(self, queries: Floats, keys: mx.array, values: mx.array, mask: Mask) -> Floats:
        """``[rows, heads, step, dim]`` → ``[rows, heads, step, value dim]``."""
        ...


class PackedLayer:
    """The same layer of all the batches, behind mlx-lm's cache protocol."""

    def __init__(self, places: Sequence[_Place], offset: mx.array) -> None:
        self._places = places
        self._fetched: list[tuple[mx.array, mx.array]] = []
        # The position of each token, [tokens]; the same array in all layers.
        self.offset = offset
        self.max_size = places[0].layer.max_size

    @property
    def layers(self) -> list[LayerCache]:
        """The layer of each batch."""
        return [place.layer for place in self._places]

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> PackedMask:
        """The mask of each part."""
        assert n == 1, "a packed step has one token a row"
        return PackedMask(
            [place.layer.make_mask(place.step, window_size, return_array) for place in self._places]
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes new tokens ``[tokens, heads, 1, dim]`` to their batches, and returns them."""
        self._fetched = [
            place.layer.update_and_fetch(_unpacked(keys, place), _unpacked(values, place))
            for place in self._places
        ]
        return keys, values

    def attend(
        self,
        queries: mx.array,
        mask: PackedMask,
        compute: Callable[[Sequence[Part]], Sequence[mx.array]],
    ) -> mx.array:
        """Attention over packed queries ``[tokens, heads, 1, dim]``; ``compute`` runs the parts.

        Returns:
            ``[tokens, heads, 1, value dim]``.
        """
        parts = [
            Part(place.layer, _unpacked(queries, place), *fetched, part_mask)
            for place, fetched, part_mask in zip(
                self._places, self._fetched, mask.masks, strict=True
            )
        ]
        self._fetched = []
        outputs = zip(compute(parts), self._places, strict=True)
        return mx.concatenate([_repacked(output, place) for output, place in outputs])

    def attend_on_host(
        self, queries: Floats, keys: Floats, values: Floats, mask: PackedMask, attend: HostAttend
    ) -> Floats:
        """As ``update_and_fetch`` and ``attend``, for arrays of NumPy, ``[tokens, heads, dim]``."""
        outputs = []
        for place, part_mask in zip(self._places, mask.masks, strict=True):
            own = slice(place.start, place.stop)
            arrays = queries[own], keys[own], values[own]
            outputs.append(_attended_on_host(*arrays, place, part_mask, attend))
        return np.concatenate(outputs)


def attend_on_host(
    layer: LayerCache,
    queries: Floats,
    keys: Floats,
    values: Floats,
    mask: Mask,
    attend: HostAttend,
) -> Floats:
    """As ``PackedLayer.attend_on_host``, for one layer with one token a row."""
    rows = len(queries)
    place = _Place(layer, 0, rows, [1] * rows, 1, None)
    return _attended_on_host(queries, keys, values, place, mask, attend)


@contextmanager
def packed(steps: Sequence[BatchStep]) -> Iterator[Sequence[Any]]:
    """Context of one model call that steps several batches at once.

    The model is called with tokens ``[tokens, 1]``, batch by batch and row by row. The batches must
    have the same kinds of layers and no recurrent states.

    Yields:
        The layers to call the model with.
    """
    with ExitStack() as stack:
        positions: list[int] = []
        ranges: list[tuple[int, int]] = []
        for step in steps:
            own = step.positions
            ranges.append((len(positions), len(positions) + len(own)))
            positions += own
            stack.enter_context(step.begin(step.columns, step.real))
        offset = mx.array(positions, mx.int32)
        ragged = [step.ragged() for step in steps]
        layers = []
        for same in zip(*(step.batch.parts for step in steps), strict=True):
            places = [
                _Place(layer, start, stop, step.tokens, step.columns, uneven)
                for layer, (start, stop), step, uneven in zip(
                    same, ranges, steps, ragged, strict=True
                )
            ]
            layers.append(PackedLayer(places, offset))
        yield steps[0].batch.view(layers)


def _unpacked(tokens: mx.array, place: _Place) -> mx.array:
    """One layer's part of ``[tokens, heads, 1, dim]``, as ``[rows, heads, step, dim]``."""
    part = tokens[place.start : place.stop]
    return _by_row(part if place.ragged is None else part[place.ragged.tokens], place.step)


def _repacked(output: mx.array, place: _Place) -> mx.array:
    """``[rows, heads, step, dim]`` as ``[tokens, heads, 1, dim]``, without padding."""
    packed = _by_column(output)
    return packed if place.ragged is None else packed[place.ragged.columns]


def _attended_on_host(
    queries: Floats, keys: Floats, values: Floats, place: _Place, mask: Mask, attend: HostAttend
) -> Floats:
    layer = place.layer
    seen = layer.write_on_host(keys, values, place.counts)
    if seen is None:
        new = (mx.array(_unpacked_on_host(tokens, place)) for tokens in (keys, values))
        seen = layer.update_and_fetch(*new)
    if layer.sees_all(mask, place.step):
        all_keys, all_values = layer.state
        mixed = attend.by_row(queries, all_keys, all_values, place.counts, layer.ring.cursors)
        if mixed is not None:
            return mixed
    mixed = _by_column(attend.masked(_unpacked_on_host(queries, place), *seen, mask))[:, :, 0]
    return mixed if place.ragged is None else mixed[place.ragged.host_columns]


def _unpacked_on_host(tokens: Floats, place: _Place) -> Floats:
    """``[tokens, heads, dim]`` as ``[rows, heads, step, dim]``."""
    padded = tokens if place.ragged is None else tokens[place.ragged.host_tokens]
    return _by_row(padded[:, :, None], place.step)


def _by_row(columns: Array, step: int) -> Array:
    """``[rows * step, heads, 1, dim]`` as ``[rows, heads, step, dim]``."""
    if step == 1:
        return columns
    count, heads, _, dim = columns.shape
    return columns.reshape(count // step, step, heads, dim).swapaxes(1, 2)


def _by_column(rows: Array) -> Array:
    """``[rows, heads, step, dim]`` as ``[rows * step, heads, 1, dim]``."""
    count, heads, step, dim = rows.shape
    return rows if step == 1 else rows.swapaxes(1, 2).reshape(count * step, heads, 1, dim)
