"""The parameters of the rows whose tokens are drawn, as arrays that stay for many steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.messages import SamplingParams

# Temperatures below this (vLLM's bound) are greedy, because all weights would be 1 or 0.
GREEDY_BELOW = 1e-5
# Random keys are computed modulo two to the power of 64.
_BITS = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Drawing:
    """The rows to draw tokens for, in order; a row may occur several times.

    Attributes:
        numbers: which rows of the batch they are.
        host_options: temperature, top_k, top_p and min_p, ``[4, rows]`` float32; a temperature of
            0 for greedy rows, and 0, 1 and 0 where a row does not have a filter.
        seeds: ``[rows]``.
    """

    numbers: list[int]
    host_options: NDArray[np.float32]
    seeds: NDArray[np.uint64]

    @classmethod
    def of(cls, params: Seq[SamplingParams], rows: list[int]) -> Drawing:
        """The drawing of some rows of a batch with these parameters."""
        own = [params[row] for row in rows]
        columns = [
            [p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in own],
            [p.top_k for p in own],
            [p.top_p for p in own],
            [p.min_p for p in own],
        ]
        seeds = np.array([p.seed & _BITS for p in own], np.uint64)
        return cls(rows, np.array(columns, np.float32), seeds)

    @cached_property
    def rows(self) -> mx.array:
        """``numbers`` on the device."""
        return mx.array(self.numbers, mx.int32)

    @cached_property
    def options(self) -> mx.array:
        """``host_options`` on the device."""
        return mx.array(self.host_options)

    @cached_property
    def temperature(self) -> mx.array:
        """``[rows, 1]``."""
        return self.options[0][:, None]

    @cached_property
    def filters(self) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """top_k, top_p and min_p, ``[rows, 1]`` each; None if no row has that filter."""
        # NOTE: iterating over an array of the device evaluates it.
        top_k, top_p, min_p = (
            None if np.all(self.host_options[kind] == off) else self.options[kind][:, None]
            for kind, off in ((1, 0.0), (2, 1.0), (3, 0.0))
        )
        return top_k, top_p, min_p

    @property
    def largest_k(self) -> int:
        """The largest top_k, if every row has that filter; else 0."""
        top_k = self.host_options[1]
        return int(top_k.max()) if np.all(top_k > 0) else 0

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
