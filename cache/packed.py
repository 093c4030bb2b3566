"""Runs several batches in one model call: the model sees every new token as a row.

A decode step has one token for each of many rows, a prompt's chunk many tokens of one row. Packed
as ``[tokens, 1]``, they share each product with the weights, and no row is padded. Only attention
has to separate the batches: each batch's layer writes its tokens to its own buffers, and each part
attends to its own keys. Packing is impossible if the model's attention does not go through
``attend``, or if any other operation mixes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache, Mask


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
    """

    batch: BatchCache
    tokens: int
    real: int


class _Place(NamedTuple):
    """A layer's range ``[start, stop)`` of the packed tokens: ``step`` of each of its rows."""

    layer: LayerCache
    start: int
    stop: int
    step: int


class PackedLayer:
    """The same layer of all the batches, behind mlx-lm's cache protocol."""

    def __init__(self, places: Sequence[_Place], offset: mx.array) -> None:
        self._places = places
        self._fetched: list[tuple[mx.array, mx.array]] = []
        # The position of each token, [tokens]; the same array in all layers.
        self.offset = offset
        self.max_size = places[0].layer.max_size

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
        return mx.concatenate([_repacked(output) for output in compute(parts)])


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
        starts: list[int] = []
        for batch, step, real in steps:
            starts.append(len(positions))
            positions += [offset + i for offset in batch.offsets for i in range(step)]
            stack.enter_context(batch.step(step, [real] * len(batch)))
        stops = [*starts[1:], len(positions)]
        offset = mx.array(positions, mx.int32)
        layers = []
        for same in zip(*(batch.parts for batch, _, _ in steps), strict=True):
            places = [
                _Place(layer, start, stop, step)
                for layer, start, stop, (_, step, _) in zip(same, starts, stops, steps, strict=True)
            ]
            layers.append(PackedLayer(places, offset))
        yield steps[0][0].view(layers)


def _unpacked(tokens: mx.array, place: _Place) -> mx.array:
    """One layer's part of ``[tokens, heads, 1, dim]``, as ``[rows, heads, step, dim]``."""
    part = tokens[place.start : place.stop]
    if place.step == 1:
        return part
    rows, heads = (place.stop - place.start) // place.step, tokens.shape[1]
    return part.reshape(rows, place.step, heads, -1).swapaxes(1, 2)


def _repacked(output: mx.array) -> mx.array:
    """``[rows, heads, step, dim]`` as ``[rows * step, heads, 1, dim]``."""
    rows, heads, step, dim = output.shape
    return output if step == 1 else output.swapaxes(1, 2).reshape(rows * step, heads, 1, dim)
