"""Arrival times of requests: a gamma process, which is a Poisson process for burstiness 1.

Its rate is constant, or increases from one request to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Far below the gaps that a clock can tell apart, and not yet 0 when it is divided by a rate.
_SMALLEST_GAP = 1e-250


def arrival_offsets(
    count: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Seconds from the start of the run to each arrival, ascending.

    ``request_rate`` is in requests per second; inf means all at once. The gaps have mean 1/rate and
    a squared coefficient of variation of 1/``burstiness``: bursty below 1, regular above 1, and
    constant for inf.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    return _at_rates(np.full(count, request_rate), burstiness, rng)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A request rate that increases from ``start`` to ``end`` requests per second, as in vLLM.

    From one request to the next, the rate grows by a constant difference (linear) or a constant
    factor (exponential).
    """

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def offsets(self, count: int, burstiness: float, rng: np.random.Generator) -> list[float]:
        """Like ``arrival_offsets``; the last request arrives after the sum of the mean gaps."""
        space = np.linspace if self.strategy == "linear" else np.geomspace
        return _at_rates(space(self.start, self.end, count), burstiness, rng)

    def count(self, seconds: float) -> int:
        """The number of requests with which the ramp takes ``seconds``; at least 1."""
        growth = math.log(self.end / self.start) / (self.end - self.start)
        mean_gap = growth if self.strategy == "linear" else 1 / (self.start * self.end * growth)
        return max(1, round(seconds / mean_gap))


def _at_rates(
    rates: np.typing.NDArray[np.float64], burstiness: float, rng: np.random.Generator
) -> list[float]:
    """One arrival for each rate, which determines the gap before it."""
    if math.isinf(burstiness):
        gaps = np.full(len(rates), 1.0)
    else:
        gaps = rng.gamma(shape=burstiness, size=len(rates))
        # A tiny gap is rounded to 0. If all were 0, their sum could not be scaled.
        gaps = np.maximum(gaps, _SMALLEST_GAP)
    offsets = np.cumsum(gaps / rates)
    # The sum of a few random gaps deviates from its mean by percents, which would distort the
    # throughput. Scale it, so that the last request arrives as with mean gaps for every seed (vLLM
    # does the same at a constant rate).
    scaled: list[float] = (offsets * ((1 / rates).sum() / offsets[-1])).tolist()
    return scaled
