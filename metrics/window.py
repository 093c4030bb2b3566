"""Counts and percentiles over a sliding time window, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

# Values within this factor share a bucket; a person cannot tell them apart.
RATIO = 1.05
_LOG_RATIO = math.log(RATIO)
# Times shorter than a microsecond count as a microsecond.
_MIN_VALUE = 1e-6


class Tally:
    """Counts by key over the last ``seconds``, dropped in slots of ``slot`` seconds.

    ``now`` is in seconds of a monotonic clock.
    """

    def __init__(self, seconds: float, slot: float = 1.0) -> None:
        self._seconds = seconds
        self._slot = slot
        self._slots: deque[tuple[float, Counter[int]]] = deque()

    def add(self, keys: Iterable[int], now: float) -> None:
        """Counts each key once."""
        self._current(now).update(keys)

    def add_many(self, key: int, times: int, now: float) -> None:
        """Counts one key ``times`` times."""
        self._current(now)[key] += times

    def counts(self, now: float) -> Counter[int]:
        """The count of each key in the window that ends ``now``."""
        self._forget(now)
        total: Counter[int] = Counter()
        for _, counted in self._slots:
            total.update(counted)
        return total

    def _current(self, now: float) -> Counter[int]:
        self._forget(now)
        if not self._slots or now >= self._slots[-1][0] + self._slot:
            self._slots.append((now, Counter()))
        return self._slots[-1][1]

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - self._seconds:
            self._slots.popleft()


class Percentiles:
    """Percentiles of the values of the last ``seconds``, accurate to half of ``RATIO``'s 5 %."""

    def __init__(self, seconds: float) -> None:
        self._tally = Tally(seconds)

    def add(self, values: Sequence[float], now: float) -> None:
        """Adds values, which must not be negative."""
        if values:
            self._tally.add([_bucket(value) for value in values], now)

    def at(self, shares: Sequence[float], now: float) -> list[float] | None:
        """The percentiles ``shares`` (0 to 1); None if the window is empty."""
        counts = self._tally.counts(now)
        total = counts.total()
        if not total:
            return None
        found: list[float] = []
        for share in shares:
            below, rank = 0, max(1, math.ceil(share * total))
            for bucket in sorted(counts):
                below += counts[bucket]
                if below >= rank:
                    found.append(_middle(bucket))
                    break
        return found


def _bucket(value: float) -> int:
    return math.floor(math.log(max(value, _MIN_VALUE)) / _LOG_RATIO)


def _middle(bucket: int) -> float:
    return math.exp((bucket + 0.5) * _LOG_RATIO)
