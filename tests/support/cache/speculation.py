"""Batches whose keys, values and states are computed from their tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.quantized import Quantization

HEADS, DIM = 2, 32
PACKING = Quantization(bits=8, group=32)


def kv_of(tokens: np.ndarray) -> tuple[mx.array, mx.array]:
    """Keys and values ``[rows, heads, length, dim]``; a key's first number is its token's."""
    lanes = np.arange(HEADS)[:, None, None] / 4 + np.arange(DIM) / 64
    keys = (tokens[:, None, :, None] + lanes).astype(np.float32)
    return mx.array(keys), mx.array(-keys[..., ::-1])


def recurrent_state(state: mx.array, tokens: np.ndarray) -> mx.array:
    """The state ``[rows, 3]`` after a recurrence over ``tokens``; equal for any chunks."""
    for i in range(tokens.shape[1]):
        state = state * 0.5 + mx.array(tokens[:, i : i + 1].astype(np.float32)) * mx.array(
            [1, 2, 3]
        )
    return state


def feed(batch: BatchCache, tokens: np.ndarray) -> list[tuple[mx.array, mx.array]]:
    """A forward pass as caches see it; returns each attention layer's fetched keys and values."""
    fetched = []
    for part in batch.parts:
        if isinstance(part, LayerCache):
            fetched.append(part.update_and_fetch(*kv_of(tokens)))
        else:
            state = part[0]
            part[0] = recurrent_state(
                mx.zeros((len(tokens), 3)) if state is None else state, tokens
            )
    return fetched


def assert_rows_hold(batch: BatchCache, rows: Sequence[Sequence[int]], packing: Any = None) -> None:
    """Every row's offset, keys, values and states are those of its tokens, to the bit."""
    batch.check_integrity()
    assert batch.offsets == [len(row) for row in rows]
    for r, row in enumerate(rows):
        snapshot = batch.extract(r)
        for kind, piece in zip(batch.kinds, snapshot.layers, strict=True):
            tokens = np.array([row]).reshape(1, -1)
            if kind.recurrent:
                state = np.array(recurrent_state(mx.zeros((1, 3)), tokens))
                stored = np.zeros_like(state) if piece is None else np.array(piece.slots[0])
                assert np.array_equal(stored, state)
                continue
            needed = min(len(row), kind.window or len(row))
            assert (piece.tokens if piece else 0) >= needed
            if piece is not None:
                for array, expected in zip(piece.newest(needed).arrays, kv_of(tokens), strict=True):
                    expected = expected[:, :, len(row) - needed :]
                    expected = packing.pack(expected) if packing else expected
                    assert np.array_equal(np.array(array), np.array(expected))
