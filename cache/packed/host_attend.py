"""The interface of attention in NumPy, which ``engine.cpu`` implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.layer import Mask

Floats = NDArray[np.float32]


class HostAttend(Protocol):
    """Attention in NumPy."""

    def by_row(
        self,
        queries: Floats,
        keys: mx.array,
        values: mx.array,
        counts: Sequence[int],
        seen: Sequence[tuple[int, int]],
    ) -> Floats | None:
        """Attention of each row's new tokens to columns of the row up to their own.

        Args:
            queries: ``[tokens, heads, dim]``, row by row.
            keys, values: ``[rows, key heads, columns, dim]``.
            counts: the new tokens of each row.
            seen: the columns of each row before its new tokens; see ``Ring.seen``.

        Returns:
            ``[tokens, heads, value dim]``; None if heads of this form are not supported.
        """
        ...

    def masked(self, queries: Floats, keys: mx.array, values: mx.array, mask: Mask) -> Floats:
        """``[rows, heads, step, dim]`` → ``[rows, heads, step, value dim]``."""
        ...
