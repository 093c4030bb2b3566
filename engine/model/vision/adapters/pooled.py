"""Groups of ``ratio`` tokens that become one entry each, in different steps for different rows.

A group's entry is in the column of its last token, in a ring with a column for each token. The
inputs of an incomplete group's tokens are in a window of ``ratio`` tokens. So rows can be rewound,
shared and stored like those of any ring, as in ``adapters.deepseek_v41``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from chairlift.cache.layer import LayerCache

# Makes entries of groups: from two arrays [rows, groups, ratio, ...] and the groups' numbers
# [rows, groups] to [rows, groups, dim].
Pool = Callable[[mx.array, mx.array, mx.array], mx.array]


@dataclass(slots=True)
class PooledLayer:
    """The two rings of a layer's groups; groups of one token need no second one."""

    entries: LayerCache
    parts: LayerCache | None
    ratio: int

    def update_and_fetch(self, one: mx.array, other: mx.array, pool: Pool) -> mx.array:
        """Adds what new tokens bring, two arrays ``[rows, length, ...]``.

        Returns:
            The entries by number, ``[rows, groups, dim]``, of as many groups as the longest row has
            complete, or one. Those that a row has not completed are arbitrary.
        """
        rows, length, _ = one.shape
        start, ratio = self.entries.offset, self.ratio
        first = start // ratio
        numbers = first[:, None] + mx.arange(-(-length // ratio))
        newest = start[:, None] + length - 1
        parts = [one[:, :, None], other[:, :, None]]
        if self.parts is not None:
            cached_parts = self.parts.update_and_fetch(one[:, None], other[:, None])
            tokens = (numbers[..., None] * ratio + mx.arange(ratio)).reshape(rows, -1)
            columns = self.parts.ring.index(newest - tokens, length)
            shape = *numbers.shape, ratio
            parts = [_at(part, columns).reshape(*shape, part.shape[-1]) for part in cached_parts]
        entries = pool(parts[0], parts[1], numbers)
        # Each token writes its group's entry, of which the last one's is complete.
        group = (start[:, None] + mx.arange(length)) // ratio - first[:, None]
        new = _at(entries[:, None], mx.minimum(group, entries.shape[1] - 1))[:, None]
        cached, _ = self.entries.update_and_fetch(new, mx.zeros((rows, 1, length, 0), new.dtype))
        count = max(1, (int(start.max()) + length) // ratio)
        last = mx.arange(1, count + 1) * ratio - 1
        return _at(cached, self.entries.ring.index(newest - last, length))


def _at(ring: mx.array, columns: mx.array) -> mx.array:
    """Gathers ``columns``, ``[rows, n]``, of ``[rows, 1, columns, dim]``: ``[rows, n, dim]``."""
    return mx.take_along_axis(ring[:, 0], columns[..., None], axis=1)
