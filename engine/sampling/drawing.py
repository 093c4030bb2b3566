"""The parameters of the rows whose tokens are drawn, as arrays that stay for many steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.views import view
from chairlift.engine.messages import SamplingParams

# Temperatures below this (vLLM's bound) are greedy, because all weights would be 1 or 0.
GREEDY_BELOW = 1e-5
# Random keys are computed modulo two to the power of 64.
_BITS = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Drawing:
    """The rows to draw tokens for, in order; a row may occur again.

    Attributes:
        rows: their numbers, ``[rows]`` int32.
        temperature: ``[rows, 1]`` float32.
        top_k, top_p, min_p: as ``temperature``; None if no row has that filter.
        largest_k: the largest top_k, if every row has that filter; else 0.
        options: all four, ``[4, rows]`` float32; a temperature of 0 for greedy rows.
        seeds: ``[rows]``.
        numbers: as ``rows``.
    """

    rows: mx.array
    temperature: mx.array
    top_k: mx.array | None
    top_p: mx.array | None
    min_p: mx.array | None
    largest_k: int
    seeds: NDArray[np.uint64]
    numbers: list[int]

    @classmethod
    def of(cls, params: Seq[SamplingParams], rows: list[int]) -> Drawing:
        """The drawing of some rows of a batch with these parameters."""
        own = [params[row] for row in rows]
        return cls(
            mx.array(rows, mx.int32),
            column(own, lambda p: p.temperature),
            column(own, lambda p: p.top_k) if any(p.top_k > 0 for p in own) else None,
            column(own, lambda p: p.top_p) if any(p.top_p < 1 for p in own) else None,
            column(own, lambda p: p.min_p) if any(p.min_p > 0 for p in own) else None,
            max(p.top_k for p in own) if all(p.top_k > 0 for p in own) else 0,
            np.array([p.seed & _BITS for p in own], np.uint64),
            rows,
        )

    @cached_property
    def options(self) -> mx.array:
        none = mx.zeros_like(self.temperature)
        columns = [
            mx.where(self.temperature < GREEDY_BELOW, 0.0, self.temperature),
            none if self.top_k is None else self.top_k,
            none + 1 if self.top_p is None else self.top_p,
            none if self.min_p is None else self.min_p,
        ]
        return mx.stack([one[:, 0] for one in columns])

    @cached_property
    def host_options(self) -> NDArray[np.float32]:
        """``options`` in NumPy."""
        return view(self.options)

    def keys(self, generated: Seq[int]) -> NDArray[np.uint32]:
        """The random key of each row's next token: ``[rows, 2]`` uint32 (splitmix64's finalizer).

        Args:
            generated: the number of output tokens of each row of the batch.
        """
        positions = np.array([generated[row] for row in self.numbers], np.uint64)
        x = self.seeds * np.uint64(0x9E3779B97F4A7C15) + positions * np.uint64(0xD1B54A32D192ED03)
        x += np.uint64(1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return np.stack([x >> np.uint64(32), x], axis=-1).astype(np.uint32)


def column(params: Seq[SamplingParams], read: Callable[[SamplingParams], float]) -> mx.array:
    """One parameter of some rows, as ``[rows, 1]`` float32."""
    return mx.array([read(p) for p in params], mx.float32)[:, None]
