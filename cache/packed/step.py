"""Runs several batches in one model call: the model sees every new token as a row.

A decode step has one token for each of many rows, or a few with a draft, and a prompt's chunk many
tokens of one row. Packed as ``[tokens, 1]``, they share each product with the weights, and no row
is padded. Only attention has to separate the batches: each batch's layer writes its tokens to its
own buffers, and each part attends to its own keys. Layers that mix tokens in another way than
through ``attend`` are called part by part; see ``split``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from chairlift.cache.batch import BatchCache, Layer
from chairlift.cache.layer import LayerCache, Mask
from chairlift.cache.packed.host_attend import Floats, HostAttend
from chairlift.cache.packed.split import (
    Joint,
    PackedMask,
    Places,
    SplitPart,
    Within,
    anywhere,
    places,
)
from chairlift.cache.state import StateLayer

Array = TypeVar("Array", mx.array, Floats)


class Part(NamedTuple):
    """The attention inputs of one batch's layer.

    Attributes:
        layer: the batch's layer, or the cache of a layer's own call.
        queries: ``[rows, heads, step, dim]``.
        keys: ``[rows, key heads, columns, dim]``.
        values: as ``keys``; the last dimension may differ.
        mask: the mask of this batch.
    """

    layer: Any
    queries: mx.array
    keys: mx.array
    values: mx.array
    mask: Mask


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

    def places(self, start: int) -> Places:
        """Indices of this part's tokens in the step's list of tokens, which start at ``start``."""
        begins = start + np.cumsum([0, *self.tokens[:-1]])
        return places(begins.tolist(), self.tokens)

    @property
    def positions(self) -> list[int]:
        """The position of each token in its sequence."""
        rows = zip(self.batch.offsets, self.tokens, strict=True)
        return [offset + i for offset, count in rows for i in range(count)]


class _Part(NamedTuple):
    """A layer's part of the packed tokens, of which each row has ``counts``."""

    layer: Any
    places: Places
    counts: Sequence[int]

    def mask(self, window_size: int | None, return_array: bool) -> Mask:
        """The mask of the layer's own call."""
        if isinstance(self.layer, StateLayer):
            return None
        mask: Mask = self.layer.make_mask(self.places.length, window_size, return_array)
        return mask


class PackedLayer:
    """The same layer of all the batches, behind mlx-lm's cache protocol.

    Attributes:
        splits: the model's layer has to be called part by part; see ``split``.
        joint, within: see ``SplitLayer``.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        offset: mx.array,
        joint: Joint,
        splits: bool,
        within: Callable[[], Within],
    ) -> None:
        self.joint = joint
        self._parts = parts
        self._fetched: list[tuple[mx.array, mx.array]] = []
        # The position of each token, [tokens]; the same array in all layers.
        self.offset = offset
        self.max_size = getattr(parts[0].layer, "max_size", None)
        self.splits = splits
        self.within = within

    @property
    def layers(self) -> list[Layer]:
        """The layer of each batch."""
        return [part.layer for part in self._parts]

    @property
    def batch_parts(self) -> Sequence[_Part]:
        """The part of each batch."""
        return self._parts

    @property
    def parts(self) -> list[SplitPart]:
        """The calls of a layer that has to be called part by part."""
        return [SplitPart(part.places, part.layer) for part in self._parts]

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> PackedMask:
        """The mask of each part."""
        assert n == 1, "a packed step has one token a row"
        return PackedMask([part.mask(window_size, return_array) for part in self._parts])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes new tokens ``[tokens, heads, 1, dim]`` to their batches, and returns them."""
        self._fetched = [
            part.layer.update_and_fetch(_unpacked(keys, part), _unpacked(values, part))
            for part in self._parts
        ]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Stand for what ``update_and_fetch`` returned, for a layer that shares this one's KV.

        NOTE: only their form means something; ``attend`` reads the caches.
        """
        first, second = self._parts[0].layer.keys_and_values()
        keys, values = (
            mx.zeros((self.offset.size, each.shape[1], 1, each.shape[3]), each.dtype)
            for each in (first, second)
        )
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: PackedMask,
        compute: Callable[[Sequence[Part]], Sequence[mx.array]],
    ) -> mx.array:
        """Attention over packed queries ``[tokens, heads, 1, dim]``; ``compute`` runs the parts.

        Another layer may have written the keys and values.

        Args:
            keys, values: what the model passes to attention. They stand for those of the caches.

        Returns:
            ``[tokens, heads, 1, value dim]``.

        Raises:
            ValueError: the model has changed the heads of the keys and values that it fetched, as
                plamo does. The caches do not have such heads, so the layer has to be split.
        """
        all_fetched = self._fetched or [part.layer.keys_and_values() for part in self._parts]
        heads, own = keys.shape[1], all_fetched[0][0].shape[1]
        if heads != own or values.shape[1] != all_fetched[0][1].shape[1]:
            raise ValueError(f"attention to {heads} heads of keys and values; caches have {own}")
        parts = [
            Part(part.layer, _unpacked(queries, part), *fetched, part_mask)
            for part, fetched, part_mask in zip(self._parts, all_fetched, mask.masks, strict=True)
        ]
        self._fetched = []
        outputs = zip(compute(parts), self._parts, strict=True)
        return mx.concatenate([_repacked(output, part) for output, part in outputs])

    def attend_on_host(
        self, queries: Floats, keys: Floats, values: Floats, mask: PackedMask, attend: HostAttend
    ) -> Floats:
        """As ``update_and_fetch`` and ``attend``, for arrays of NumPy, ``[tokens, heads, dim]``.

        Without new keys and values (of no tokens), as ``attend``.
        """
        outputs = []
        for part, part_mask in zip(self._parts, mask.masks, strict=True):
            arrays = queries, keys, values
            outputs.append(_attended_on_host(*arrays, part, part_mask, attend))
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
    part = _Part(layer, _one_each(rows), [1] * rows)
    return _attended_on_host(queries, keys, values, part, mask, attend)


@functools.cache
def _one_each(rows: int) -> Places:
    """The places of rows that have one token each."""
    return places(range(rows), [1] * rows)


@contextmanager
def packed(
    steps: Sequence[BatchStep],
    splits: bool = False,
    within: Callable[[], Within] = lambda: anywhere,
) -> Iterator[Sequence[Any]]:
    """Context of one model call that steps several batches at once.

    The model is called with tokens ``[tokens, 1]``, batch by batch and row by row. The batches must
    have the same kinds of layers. In those with recurrent states, no row may have padding.

    Args:
        splits: all of the model's layers with a cache have to be called part by part, not only
            recurrent ones.
        within: see ``SplitLayer``.

    Yields:
        The layers to call the model with.
    """
    with ExitStack() as stack:
        positions: list[int] = []
        own: list[Places] = []
        for step in steps:
            own.append(step.places(len(positions)))
            positions += step.positions
            stack.enter_context(step.begin(step.columns, step.real))
        offset = mx.array(positions, mx.int32)
        joint = Joint(own, len(positions))
        layers = []
        for same in zip(*(step.batch.parts for step in steps), strict=True):
            rows = zip(same, own, (step.tokens for step in steps), strict=True)
            own_calls = splits or isinstance(same[0], StateLayer)
            parts = [_Part(*each) for each in rows]
            layers.append(PackedLayer(parts, offset, joint, own_calls, within))
        yield steps[0].batch.view(layers)


def _unpacked(tokens: mx.array, part: _Part) -> mx.array:
    """One layer's part of ``[tokens, heads, 1, dim]``, as ``[rows, heads, step, dim]``."""
    return _by_row(part.places.picked(tokens), part.places.length)


def _repacked(output: mx.array, part: _Part) -> mx.array:
    """``[rows, heads, step, dim]`` as ``[tokens, heads, 1, dim]``, without padding."""
    return part.places.unpadded(_by_column(output))


def _attended_on_host(
    queries: Floats, keys: Floats, values: Floats, part: _Part, mask: Mask, attend: HostAttend
) -> Floats:
    layer, where = part.layer, part.places
    whole = where.columns is None and where.span is not None
    own = where.span if whole else where.numbers
    if not len(keys):
        pass  # another layer has written them
    elif (written := layer.host_places(part.counts, keys.dtype)) is not None:
        written.write(keys[own], values[own])
    else:
        new = (mx.array(_unpacked_on_host(tokens, where)) for tokens in (keys, values))
        layer.update_and_fetch(*new)
    seen = layer.seen(mask, part.counts)
    if seen is not None:
        all_keys, all_values = layer.state
        mixed = attend.by_row(queries[own], all_keys, all_values, part.counts, seen)
        if mixed is not None:
            return mixed
    new_keys, new_values = layer.keys_and_values()
    result = attend.masked(_unpacked_on_host(queries, where), new_keys, new_values, mask)
    mixed = _by_column(result)[:, :, 0]
    return mixed if where.columns is None else mixed[where.columns]


def _unpacked_on_host(tokens: Floats, where: Places) -> Floats:
    """``[tokens, heads, dim]`` as ``[rows, heads, step, dim]``."""
    own = tokens[where.tokens if where.span is None else where.span]
    return _by_row(own[:, :, None], where.length)


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
