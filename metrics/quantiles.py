"""Quantiles of many values in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

# Values within this factor share a bucket; a person cannot tell them apart.
RATIO = 1.05
_LOG_RATIO = math.log(RATIO)
# Times shorter than a microsecond count as a microsecond.
_MIN_VALUE = 1e-6


class Quantiles:
    """Counts values in buckets; its quantiles are accurate to half of ``RATIO``'s 5 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, values: Iterable[float]) -> None:
        """Adds values, which must not be negative."""
        # The rows of one step mostly share their value, so most logarithms are saved.
        for value, times in Counter(values).items():
            self._counts[_bucket(value)] += times

    def update(self, other: Quantiles) -> None:
        """Adds the values of ``other``."""
        self._counts.update(other._counts)

    def at(self, shares: Sequence[float]) -> list[float] | None:
        """The quantiles ``shares`` (0 to 1) by the nearest rank; None without values."""
        counts = self._counts
        total = counts.total()
        if not total:
            return None
        found: list[float] = []
        buckets = sorted(counts)
        for share in shares:
            below, rank = 0, max(1, math.ceil(share * total))
            for bucket in buckets:
                below += counts[bucket]
                if below >= rank:
                    found.append(_middle(bucket))
                    break
        return found


def _bucket(value: float) -> int:
    return math.floor(math.log(max(value, _MIN_VALUE)) / _LOG_RATIO)


def _middle(bucket: int) -> float:
    return math.exp((bucket + 0.5) * _LOG_RATIO)
