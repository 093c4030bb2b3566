"""Estimates how likely proposed tokens are right, from those of earlier steps.

Every proposal is compared with the tokens that the sequence really got, whether or not a step has
verified it. So a source of bad proposals is found, and found to be good again, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Shares of the counts that remain after each observation.
SEQUENCE_MEMORY = 0.9
SOURCE_MEMORY = 0.99
# The estimate for a source without observations, and how many observations it is worth.
FIRST_GUESS = 0.5
GUESS_WEIGHT = 4.0
# How many observations of a sequence the estimate of its source is worth.
SOURCE_WEIGHT = 2.0


@dataclass(slots=True)
class Rate:
    """A decaying share of right tokens."""

    right: float = 0.0
    seen: float = 0.0

    def observe(self, right: int, seen: int, memory: float) -> None:
        """Counts ``seen`` proposed tokens, ``right`` of them right."""
        self.right = self.right * memory + right
        self.seen = self.seen * memory + seen

    def share(self, guess: float, weight: float) -> float:
        """The share, if a ``guess`` is worth ``weight`` observations."""
        return (self.right + guess * weight) / (self.seen + weight)


@dataclass(slots=True)
class Acceptance:
    """The shares of right tokens by source, e.g. by the kind of proposal and its match's length."""

    _sources: dict[str, Rate] = field(default_factory=dict)

    def chance(self, source: str, sequence: Rate) -> float:
        """The probability that a token is right if those before it are.

        Args:
            sequence: the observations of the sequence itself.
        """
        rate = self._sources.get(source, Rate())
        return sequence.share(rate.share(FIRST_GUESS, GUESS_WEIGHT), SOURCE_WEIGHT)

    def observe(
        self, source: str, sequence: Rate, proposed: Sequence[int], real: Sequence[int]
    ) -> None:
        """Compares a proposal with the tokens that came, up to the first wrong one."""
        right = 0
        most = min(len(proposed), len(real))
        while right < most and proposed[right] == real[right]:
            right += 1
        seen = right + (right < most)
        if seen:
            self._sources.setdefault(source, Rate()).observe(right, seen, SOURCE_MEMORY)
            sequence.observe(right, seen, SEQUENCE_MEMORY)
