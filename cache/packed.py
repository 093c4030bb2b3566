"""Several batches in one model call: every new token is a row of its own for the model.

A decode step has one token for each of many rows, a prompt's chunk many tokens of one row. Packed,
``[tokens, 1]``, they share each product with the weights, and nobody is padded. Only attention has
to know who belongs together: the batches' own layers write the tokens where they belong, and each
part attends to its own keys. Where a model's attention is not the function that ``attend`` stands
in for, or anything else in it looks from token to token, packing is not possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache, Mask


class Part(NamedTuple):
    """What one batch's layer attends with: queries ``[rows, heads, step, dim]``, the keys and
    values that they may see, ``[rows, key heads, columns, dim]``, and its mask over these.
    """

    layer: LayerCache
    queries: mx.array
    keys: mx.array
    values: mx.array
    mask: Mask


class PackedMask(NamedTuple):
    """The masks of all parts, which a model only passes on."""

    masks: list[Mask]


class BatchStep(NamedTuple):
    """A step of ``tokens`` for each of a batch's rows, of which ``real`` are the rows' own; the
    others are padding, see ``BatchCache.step``.
    """

    batch: BatchCache
    tokens: int
    real: int


class _Place(NamedTuple):
    """The tokens ``[start, stop)`` of the packed step: ``step`` of each of a layer's rows."""

    layer: LayerCache
    start: int
    stop: int
    step: int


class PackedLayer:
    """One layer of all the batches, with mlx-lm's cache protocol."""

    def __init__(self, places: Sequence[_Place], offset: mx.array) -> None:
        self._places = places
        self._fetched: list[tuple[mx.array, mx.array]] = []
        # The position of each token, [tokens]; the same array in all layers.
        self.offset = offset
        self.max_size = places[0].layer.max_size

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> PackedMask:
        """The parts' own masks."""
        assert n == 1, "a packed step has one token a row"
        return PackedMask(
            [place.layer.make_mask(place.step, window_size, return_array) for place in self._places]
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes new tokens ``[tokens, heads, 1, dim]`` where they belong, and returns them."""
        self._fetched = [
            place.layer.update_and_fetch(_of(keys, place), _of(values, place))
            for place in self._places
        ]
        return keys, values

    def attend(
        self,
        queries: mx.array,
        mask: PackedMask,
        compute: Callable[[Sequence[Part]], Sequence[mx.array]],
    ) -> mx.array:
        """Attention of ``[tokens, heads, 1, dim]``; ``compute`` does it for each part.

        Returns:
            ``[tokens, heads, 1, value dim]``.
        """
        parts = [
            Part(place.layer, _of(queries, place), *fetched, own)
            for place, fetched, own in zip(self._places, self._fetched, mask.masks, strict=True)
        ]
        self._fetched = []
        return mx.concatenate([_unfolded(mixed) for mixed in compute(parts)])


@contextmanager
def packed(steps: Sequence[BatchStep]) -> Iterator[Sequence[Any]]:
    """A step of several batches at once.

    The model gets the tokens as ``[tokens, 1]``: batch by batch, row by row. None of the batches
    may have recurrent states, and all have the same kinds of layers.

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
        for own in zip(*(batch.parts for batch, _, _ in steps), strict=True):
            places = [
                _Place(layer, start, stop, step)
                for layer, start, stop, (_, step, _) in zip(own, starts, stops, steps, strict=True)
            ]
            layers.append(PackedLayer(places, offset))
        yield steps[0][0].view(layers)


def _of(tokens: mx.array, place: _Place) -> mx.array:
    """A part of ``[tokens, heads, 1, dim]`` as its layer wants it, ``[rows, heads, step, dim]``."""
    own = tokens[place.start : place.stop]
    if place.step == 1:
        return own
    rows, heads = (place.stop - place.start) // place.step, tokens.shape[1]
    return own.reshape(rows, place.step, heads, -1).swapaxes(1, 2)


def _unfolded(mixed: mx.array) -> mx.array:
    """``[rows, heads, step, dim]`` as ``[rows * step, heads, 1, dim]``."""
    rows, heads, step, dim = mixed.shape
    return mixed if step == 1 else mixed.swapaxes(1, 2).reshape(rows * step, heads, 1, dim)
