"""Steps in which compiled functions write keys and values to a layer's buffers, and read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chairlift.cache.layer import HostPlaces, LayerCache, Mask
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer


class HostStep(NamedTuple):
    """A step of one batch whose tokens see columns of their rows up to their own.

    Attributes:
        places: where its tokens are written.
        counts: the new tokens of each row.
        begun: the columns of each row before them that all of them see.
        starts: the first of these; behind the last column of the buffer its first one follows.
    """

    places: HostPlaces
    counts: Sequence[int]
    begun: Sequence[int]
    starts: Sequence[int]


def host_step(layer: LayerCache | PackedLayer, mask: Mask | PackedMask) -> HostStep | None:
    """The step that a layer is in; the caller has to write its tokens at once.

    Args:
        mask: the one that the model passes to its layer.

    Returns:
        None if the step has several batches, several tokens of a row see different columns of a
        window, or only MLX can write the tokens.
    """
    if isinstance(layer, PackedLayer):
        assert isinstance(mask, PackedMask)
        if len(layer.layers) > 1:
            return None
        [part], [own_mask] = layer.batch_parts, mask.masks
        batch_layer, counts = part.layer, part.counts
    else:
        assert not isinstance(mask, PackedMask)
        batch_layer, own_mask, counts = layer, mask, [1] * len(layer.ring.cursors)
    seen = batch_layer.seen(own_mask, counts)
    places = None if seen is None else batch_layer.host_places(counts, np.dtype(np.float32))
    if seen is None or places is None:
        return None
    begun, starts = zip(*seen, strict=True)
    return HostStep(places, counts, begun, starts)
