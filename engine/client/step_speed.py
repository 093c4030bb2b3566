"""Learns how long a step takes, from the statistics of the steps that have ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Steps are averaged over about this many seconds of computation.
MEMORY_SECONDS = 30.0
# Part of a variable's mean square below which its variance counts as none: rounding errors, and
# steps that are too much alike to tell the variable's cost from the constant.
MIN_VARIANCE = 1e-6
# A row computes one token, so its cost is expected to be that of a prompt token. This outweighs
# what was measured until the number of rows has varied by more than about two: with less, noise of
# a busy machine looks like the cost of rows.
PRIOR_VARIANCE = 4.0


@dataclass(slots=True)
class StepSpeed:
    """Fits seconds = base + row * rows + prompt * prompt tokens, with no cost below 0.

    The fit is least squares over recent steps, with ``PRIOR_VARIANCE`` as ridge.
    """

    _weight: float = 0.0
    _rows: float = 0.0
    _tokens: float = 0.0
    _prompt: float = 0.0
    _seconds: float = 0.0
    # Sums of products: rows², rows * prompt, prompt², rows * seconds, prompt * seconds.
    _products: list[float] = field(default_factory=lambda: [0.0] * 5)

    def learn(self, prompt: int, rows: int, tokens: int, seconds: float) -> None:
        """Learns from a step of ``seconds``.

        Args:
            prompt: computed prompt tokens.
            rows: computed rows.
            tokens: output tokens of these rows, more than one a row if drafts were right.
        """
        fade = math.exp(-seconds / MEMORY_SECONDS)
        self._weight = self._weight * fade + 1
        self._rows = self._rows * fade + rows
        self._tokens = self._tokens * fade + tokens
        self._prompt = self._prompt * fade + prompt
        self._seconds = self._seconds * fade + seconds
        new = (rows * rows, rows * prompt, prompt * prompt, rows * seconds, prompt * seconds)
        self._products = [
            old * fade + product for old, product in zip(self._products, new, strict=True)
        ]

    def fit(self) -> StepCosts:
        """The costs that the steps so far show; before the first, ``UNMEASURED``."""
        if not self._weight:
            return UNMEASURED
        rows, prompt = self._rows / self._weight, self._prompt / self._weight
        seconds = self._seconds / self._weight
        squares = [product / self._weight for product in self._products]
        row, token = _slopes(
            _variance(squares[0], rows),
            squares[1] - rows * prompt,
            _variance(squares[2], prompt),
            squares[3] - rows * seconds,
            squares[4] - prompt * seconds,
        )
        base = seconds - row * rows - token * prompt
        if base < 0:  # the best fit without it goes through the origin
            base, (row, token) = 0.0, _slopes(*squares)
        return StepCosts(base, row, token, self._tokens / self._rows if self._rows else 1.0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: ``base``, and in addition for each row and for each prompt token.

    Attributes:
        gain: output tokens of a row in one step.
    """

    base: float
    row: float
    prompt: float
    gain: float = 1.0

    def step(self, rows: float) -> float:
        """Seconds of a step with this many rows and without prompts."""
        return self.base + self.row * rows


# As by the prior. The unit is arbitrary: only sums of these costs are compared.
UNMEASURED = StepCosts(0.0, 1.0, 1.0)


def _variance(square: float, mean: float) -> float:
    variance = square - mean * mean
    return variance if variance > MIN_VARIANCE * square else 0.0


def _slopes(rr: float, rp: float, pp: float, rs: float, ps: float) -> tuple[float, float]:
    """The costs of a row and of a prompt token that are at least 0 and fit best."""
    # With the prior: the squares' sum also contains PRIOR_VARIANCE * (row - prompt)².
    wide, long, both = rr + PRIOR_VARIANCE, pp + PRIOR_VARIANCE, rp - PRIOR_VARIANCE
    determinant = wide * long - both * both
    if determinant > MIN_VARIANCE * wide * long:
        row, prompt = (rs * long - ps * both) / determinant, (ps * wide - rs * both) / determinant
        if row >= 0 and prompt >= 0:
            return row, prompt
    # The best fit has one of them at 0: the one whose partner explains less.
    row, prompt = max(0.0, rs / wide), max(0.0, ps / long)
    return (row, 0.0) if row * rs >= prompt * ps else (0.0, prompt)
