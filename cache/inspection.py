"""Inspects a batch's buffers: measures the bytes of a token, and checks their consistency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.layer import LayerCache
from chairlift.cache.ring import Ring
from chairlift.cache.state import StateLayer


def measured_geometry(
    attention: Sequence[LayerCache], states: Sequence[StateLayer], rows: int
) -> KVGeometry:
    """The bytes of a token or of a row by kind of layer; ``rows`` is the number of rows in use."""
    sizes: dict[int | None, int] = {}
    largest: dict[int | None, int] = {}
    for layer in attention:
        window, size = layer.ring.window, layer.nbytes // (layer.ring.rows * layer.ring.columns)
        sizes[window] = sizes.get(window, 0) + size
        largest[window] = max(largest.get(window, 0), size)
    full = sizes.pop(None, 0)
    windows = {window: size for window, size in sizes.items() if window}
    state_bytes = sum(layer.nbytes for layer in states)
    return KVGeometry(full, windows, state_bytes // max(1, rows), largest)


def check_rings(
    rings: Mapping[int | None, Ring], offsets: Sequence[int], surplus: Sequence[int]
) -> None:
    """Asserts that each ring keeps the columns that its rows need, given tokens and padding."""
    for window, ring in rings.items():
        ring.check_integrity()
        assert len(ring.lengths) == len(offsets) == len(surplus)
        for row, length in enumerate(ring.lengths):
            kept = length - surplus[row]
            highest = offsets[row] if window is None else min(offsets[row], ring.columns)
            needed = highest if window is None else min(highest, window - 1)
            assert needed <= kept <= highest, (window, row, kept, highest)


def check_buffers(layers: Sequence[LayerCache]) -> None:
    """Asserts that each layer's buffers have the shape of its ring."""
    for layer in layers:
        for array in layer.state:
            assert array.shape[0] == layer.ring.rows, (array.shape, layer.ring)
            assert array.shape[2] == layer.ring.columns, (array.shape, layer.ring)
