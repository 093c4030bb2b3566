"""A Prometheus histogram that takes the observations of a whole step at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import repeat

import prometheus_client


class Histogram(prometheus_client.Histogram):
    """A histogram with ``observe_all``: the library's ``observe`` takes 1 us for each token."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Adds these observations."""
        self._sum.inc(sum(amounts))
        for bucket, count in Counter(map(bisect_left, repeat(self._upper_bounds), amounts)).items():
            self._buckets[bucket].inc(count)
