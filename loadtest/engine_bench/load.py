"""The requests of a mixed load: their lengths, and when they arrive."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from chairlift.loadtest.engine_bench.engines import BenchRequest
from chairlift.scheduler.simulate.traffic import Lengths


class AnyLengths(Protocol):
    """A distribution of lengths."""

    def draw(self, rng: random.Random) -> int:
        """Draws a length of at least 1 token."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """Lengths from ``low`` to ``high`` tokens, each as likely as any other."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


class Arrival(NamedTuple):
    """A request, and its arrival in seconds after the start."""

    at: float
    request: BenchRequest


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters of a mixed load; the same ones give the same requests.

    Attributes:
        requests: their number.
        prompts, outputs: lengths of prompts and outputs.
        rate: requests a second, on average, with the gaps of a Poisson process; None: all arrive at
            once.
        seed: the seed of lengths, prompts and gaps.
    """

    requests: int
    prompts: AnyLengths
    outputs: AnyLengths
    rate: float | None = None
    seed: int = 0

    def draw(self, vocabulary: int) -> Iterator[Arrival]:
        """Yields the requests in the order of their arrivals."""
        rng = random.Random(self.seed)
        at = 0.0
        for _ in range(self.requests):
            tokens = [rng.randrange(vocabulary) for _ in range(self.prompts.draw(rng))]
            request = BenchRequest(tokens, self.outputs.draw(rng))
            if self.rate is not None:
                at += rng.expovariate(self.rate)
            yield Arrival(at, request)


def lengths(text: str) -> AnyLengths:
    """Parses "LOW:HIGH", "LENGTH" or "lognormal:MEDIAN:SIGMA:MAX".

    Raises:
        argparse.ArgumentTypeError: it is none of these, or has a number that cannot work.
    """
    kind, *numbers = text.split(":")
    try:
        if kind == "lognormal":
            median, sigma, longest = float(numbers[0]), float(numbers[1]), int(numbers[2])
            valid = len(numbers) == 3 and 1 <= median < 1e9 and 0 <= sigma < 10 and longest >= 1
            distribution: AnyLengths = Lengths(median, sigma, longest)
        else:
            low, high = int(kind), int(numbers[0] if numbers else kind)
            valid = len(numbers) <= 1 and 1 <= low <= high
            distribution = Range(low, high)
    except (ValueError, IndexError):
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(
            f"{text} is neither LOW:HIGH nor lognormal:MEDIAN:SIGMA:MAX"
        )
    return distribution
