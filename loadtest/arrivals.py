"""When requests arrive: a gamma process, of which Poisson is the case of burstiness 1."""

from __future__ import annotations

import math

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
    if math.isinf(burstiness):
        gaps = np.full(count, 1.0)
    else:
        gaps = rng.gamma(shape=burstiness, size=count)
    offsets = np.cumsum(gaps)
    # The sum of a few random gaps is off its mean by percents, which would show as throughput. So
    # the last request arrives exactly at count/rate, whatever the seed (vLLM does the same).
    scaled: list[float] = (offsets * (count / request_rate / offsets[-1])).tolist()
    return scaled
