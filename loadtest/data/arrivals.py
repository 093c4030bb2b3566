"""When requests arrive: a gamma process, of which Poisson is the case of burstiness 1.

Its rate is constant, or climbs from one request to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


def arrival_offsets(
    count: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Seconds from the start of the run to each arrival, ascending.

    ``request_rate`` is requests a second; inf means all at once. The gaps have mean 1/rate and a
    squared coefficient of variation of 1/``burstiness``: below 1 bursty, above 1 regular, inf a
    fixed rhythm.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    return _at_rates(np.full(count, request_rate), burstiness, rng)


@dataclass(frozen=True, slots=True)
class Ramp:
    """Rates that climb from ``start`` to ``end`` requests a second, as vLLM's.

    From one request to the next the rate grows by the same number of requests a second (linear) or
    by the same factor (exponential).
    """

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def offsets(self, count: int, burstiness: float, rng: np.random.Generator) -> list[float]:
        """As ``arrival_offsets``; the last request arrives after the mean gaps of all."""
        space = np.linspace if self.strategy == "linear" else np.geomspace
        return _at_rates(space(self.start, self.end, count), burstiness, rng)

    def count(self, seconds: float) -> int:
        """How many requests such a climb takes that is over after ``seconds``; at least 1."""
        growth = math.log(self.end / self.start) / (self.end - self.start)
        mean_gap = growth if self.strategy == "linear" else 1 / (self.start * self.end * growth)
        return max(1, round(seconds / mean_gap))


def _at_rates(
    rates: np.typing.NDArray[np.float64], burstiness: float, rng: np.random.Generator
) -> list[float]:
    """An arrival for each of the rates, which hold for the gap before it."""
    if math.isinf(burstiness):
        gaps = np.full(len(rates), 1.0)
    else:
        gaps = rng.gamma(shape=burstiness, size=len(rates))
    offsets = np.cumsum(gaps / rates)
    # The sum of a few random gaps is off its mean by percents, which would show as throughput. So
    # the last request arrives when it would with mean gaps, whatever the seed (vLLM does the same
    # at a constant rate).
    scaled: list[float] = (offsets * ((1 / rates).sum() / offsets[-1])).tolist()
    return scaled
