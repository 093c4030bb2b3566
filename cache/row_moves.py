"""Puts rows' columns behind the new cursor after a speculative commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from chairlift.cache.layer import LayerCache
from chairlift.cache.ring import Move
from chairlift.cache.snapshot import KVPiece

# Copies of moving rows are kept together up to this size: few waits, little extra memory.
MOVED_BYTES = 256 << 20


def move_rows(layers: Sequence[LayerCache], moves: Mapping[int | None, Sequence[Move]]) -> None:
    """Moves rows within the buffers of ``layers``; ``moves`` is by the window of their ring.

    Rows are read out, a few layers at a time, before they are written, so this waits for the
    device.
    """
    copies: list[tuple[LayerCache, int, KVPiece]] = []
    for layer in layers:
        moving = [move for move in moves[layer.ring.window] if move.tokens]
        copies += [(layer, move.row, layer.get(*move).copy()) for move in moving]
        if sum(piece.nbytes for _, _, piece in copies) > MOVED_BYTES:
            _write(copies)
            copies = []
    _write(copies)


def _write(copies: Sequence[tuple[LayerCache, int, KVPiece]]) -> None:
    # Evaluate all copies first, or MLX would copy the buffers; see BatchCache.take_moves.
    mx.eval([piece.arrays for _, _, piece in copies])
    for layer, row, piece in copies:
        layer.put(row, piece)
    mx.eval([layer.state for layer, _, _ in copies])
