"""The axes of a chart: positions of values, and tick labels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# With a larger ratio of values, a linear axis would squeeze most of them at its beginning.
_LOG_RATIO = 30.0
_TICKS = 5
_ROUND = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``, linear or logarithmic, of values in ``unit``.

    With ``integers``, it is an axis of counts and has ticks at integers only.
    """

    low: float
    high: float
    unit: str
    log: bool = False
    integers: bool = False

    @property
    def title(self) -> str:
        """The unit and the kind of the scale, as the axis's label."""
        return f"{self.unit} ({'log' if self.log else 'linear'} scale)"

    def position(self, value: float) -> float:
        """The position of a value, 0 at ``low`` and 1 at ``high``; values outside are clipped."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round numbers for tick labels, ascending."""
        if not self.log:
            step = _step(self.high - self.low, self.integers)
            first = math.ceil(self.low / step)
            return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = math.log10(self.high / self.low)
        digits = (1, 2, 5) if decades < 3 else (1,)
        every = max(1, round(decades / _TICKS))
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [d * 10.0**p for p in powers if p % every == 0 for d in digits]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def axis_from_zero(highest: float, unit: str, integers: bool = False) -> Axis:
    """A linear axis from 0 to the first round number that is at least ``highest``."""
    if highest <= 0:
        return Axis(0.0, 1.0, unit, integers=integers)
    step = _step(highest, integers)
    return Axis(0.0, step * math.ceil(highest / step - 1e-9), unit, integers=integers)


def axis_around(values: Iterable[float], unit: str) -> Axis:
    """An axis for positive values: logarithmic if they are far apart, else linear from 0."""
    positive = [value for value in values if value > 0]
    if not positive:
        return Axis(0.0, 1.0, unit)
    low, high = min(positive), max(positive)
    if high / low < _LOG_RATIO:
        return axis_from_zero(high, unit)
    return Axis(_round_down(low), _round_up(high), unit, log=True)


def shown(value: float) -> str:
    """The text of a tick label."""
    if value >= 1e9:
        return f"{value:.0e}".replace("+", "")
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}" if value >= 1e-4 or value == 0 else f"{value:.0e}"


def _step(length: float, integers: bool) -> float:
    step = _round_up(length / _TICKS)
    return max(1.0, step) if integers else step


def _round_up(value: float) -> float:
    """The next larger number of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in _ROUND if step * power >= value * (1 - 1e-9))


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return power * max(step for step in _ROUND if step * power <= value * (1 + 1e-9))
