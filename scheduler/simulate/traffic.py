"""Generates requests from a seed: bursty arrivals, long-tailed lengths, some users very active."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from chairlift.scheduler.simulate.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of lengths, cut off at ``max_tokens``.

    Half of the lengths are below ``median``, 16 % above ``median * e**sigma``.
    """

    median: float
    sigma: float
    max_tokens: int

    def draw(self, rng: random.Random) -> int:
        """Draws a length from 1 to ``max_tokens`` tokens."""
        length = round(self.median * math.exp(rng.gauss(0.0, self.sigma)))
        return max(1, min(self.max_tokens, length))


@dataclass(frozen=True, slots=True)
class Traffic:
    """The parameters of generated requests.

    Args:
        requests: the number of requests.
        rate: requests a second, on average.
        burstiness: shape of the gamma process of arrivals, as in ``chairlift bench``: 1 is
            Poisson, less is burstier.
        users: the number of users; the n-th sends 1/n as many requests as the first.
        priorities: the share of requests of each priority.
        prompts: prompt lengths.
        outputs: output lengths.
        seed: the seed of the random numbers.

    Raises:
        ValueError: a number is not valid; the text names the command's flag.
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
            raise ValueError(
                f"shares of priorities must not be below 0, or all 0, but are {[*shares]}"
            )

    def draw(self) -> Iterator[TraceRequest]:
        """Yields the requests; the same for the same parameters."""
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
            # Clients set a round maximum, and the model ends before it.
            max_tokens = 1 << (output - 1).bit_length()
            (user,) = rng.choices(names, cum_weights=weights)
            (priority,) = rng.choices(classes, cum_weights=shares)
            prompt = self.prompts.draw(rng)
            yield TraceRequest(arrival, prompt, output, max_tokens, user, priority)
