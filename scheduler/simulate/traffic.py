"""Requests out of a seed: arrivals in bursts, lengths of which few are very long, busy users."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from chairlift.scheduler.simulate.trace import Request


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, log-normal: half of them are below ``median``, 16 % above ``median * e**sigma``."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One length, of 1 to ``most`` tokens."""
        return max(1, min(self.most, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


@dataclass(frozen=True, slots=True)
class Traffic:
    """``requests`` arrive at ``rate`` a second on average.

    The gaps between them are a gamma process as in ``chairlift bench``: ``burstiness`` 1 is
    Poisson, below is burstier. The n-th of the ``users`` asks an n-th as often as the first.
    ``priorities`` has the share of the requests that are of each priority.

    Raises:
        ValueError: a number that makes no sense, in the words of the command line.
    """

    requests: int
    rate: float
    burstiness: float = 1.0
    users: int = 100
    priorities: Mapping[int, float] = field(default_factory=lambda: {0: 0.8, 1: 0.2})
    prompts: Lengths = Lengths(300, 1.0, 8192)
    outputs: Lengths = Lengths(150, 0.8, 2048)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "rate", "burstiness", "users"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        shares = self.priorities.values()
        if not all(0 <= share < math.inf for share in shares) or not 0 < sum(shares) < math.inf:
            raise ValueError(f"shares of priorities must not be below 0, or all 0: {shares}")

    def draw(self) -> Iterator[Request]:
        """The requests, the same for the same numbers."""
        rng = random.Random(self.seed)
        names = [f"user-{number}" for number in range(self.users)]
        weights = list(accumulate(1 / (number + 1) for number in range(self.users)))
        classes = list(self.priorities)
        shares = list(accumulate(self.priorities.values()))
        scale = 1 / (self.rate * self.burstiness)
        arrival = 0.0
        for _ in range(self.requests):
            arrival += rng.gammavariate(self.burstiness, scale)
            output = self.outputs.draw(rng)
            # People ask for a round number, and the model ends before.
            most = 1 << (output - 1).bit_length()
            (user,) = rng.choices(names, cum_weights=weights)
            (priority,) = rng.choices(classes, cum_weights=shares)
            yield Request(arrival, self.prompts.draw(rng), output, most, user, priority)
