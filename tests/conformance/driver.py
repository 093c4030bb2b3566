"""The interface of Chairlift's caches that the checks use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.kinds import UnsupportedKind, make_batch
from chairlift.engine.model.adapters import adapt

__all__ = ["Batch", "UnsupportedKind"]


class Batch:
    """A model with a batch of rows, which checks itself after every change.

    Raises:
        UnsupportedKind: the model wants caches that cannot be batched.
    """

    def __init__(self, model: Any) -> None:
        adapt(model)
        self._model = model
        self._cache: BatchCache = make_batch(model)

    @property
    def pads(self) -> bool:
        """Whether rows of different length can share a prefill."""
        return self._cache.pads

    def reserve(self, rows: int, columns: int) -> None:
        """Reserves rows and columns in advance."""
        self._cache.reserve(Capacity(rows, columns))
        self._cache.check_integrity()

    def join(self, state: Any = None, columns: int = 0) -> None:
        """Adds a row at the end."""
        row = self._cache.join(state, columns=columns)
        assert row == len(self._cache) - 1, (row, len(self._cache))
        self._cache.check_integrity()

    def step(self, tokens: list[list[int]]) -> mx.array:
        """Logits ``[rows, length, vocabulary]``. Rows may differ in length where ``pads``."""
        real = [len(row) for row in tokens]
        length = max(real)
        padded = mx.array([row + [0] * (length - len(row)) for row in tokens])
        with self._cache.step(length, None if min(real) == length else real):
            logits: mx.array = self._model(padded, cache=self._cache.layers)
        mx.eval(logits)
        self._cache.check_integrity()
        return logits

    def extract(self, row: int) -> Any:
        """One row's state, for another batch."""
        return self._cache.extract(row)

    def leave(self, rows: Collection[int]) -> list[int]:
        """Removes rows; returns the old numbers of those that stay, in their new order."""
        order: list[int] = self._cache.leave(rows)
        mx.eval(self._cache.take_moves())
        self._cache.check_integrity()
        return order
