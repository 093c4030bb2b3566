"""Defines a metric and the histogram buckets. Bounds are vLLM's where vLLM has the metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Bucket bounds in seconds; the inter-token ones start lower than vLLM's, for small models.
TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LAT = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION = (1.0, *(float(8 << i) for i in range(12)))
STEP = (0.0001, 0.0002, 0.0005, *ITL[:16])
ROWS = tuple(float(1 << i) for i in range(11))
RATIO = tuple(i / 10 for i in range(11))
LAG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        key: its name in the recorder.
        name: its name in Prometheus.
        kind: its type.
        help: its help text.
        labels: the names of its labels.
        buckets: upper bounds of a histogram; "tokens": the 1-2-5 series up to the model's context.
        values: values of its last label that exist from the start, at 0; "positions": the numbers
            from 0 to the maximum length of a draft.
        fields: the StepStats fields that the recorder copies into it after each step: a number, a
            list of observations, or a dictionary by label value; or one field for each of
            ``values``.
        recorded_by: the Recorder method that computes it, if it has no ``fields``.
    """

    key: str
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | Literal["tokens"] = ()
    values: tuple[str, ...] | Literal["positions"] = ()
    fields: tuple[str, ...] = ()
    recorded_by: str = ""

    def values_for(self, draft_tokens: int) -> tuple[str, ...]:
        """The ``values``; ``draft_tokens`` is the maximum length of a draft."""
        if self.values == "positions":
            return tuple(map(str, range(draft_tokens)))
        return self.values


def token_buckets(longest: int) -> tuple[float, ...]:
    """The 1-2-5 series up to and including ``longest`` tokens."""
    bounds = [
        float(digit * 10**power)
        for power in range(len(str(longest)))
        for digit in (1, 2, 5)
        if digit * 10**power < longest
    ]
    return (*bounds, float(longest))
