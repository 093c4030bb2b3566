"""What a simulation writes down as it goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.scheduler.scheduler import Plan

# Virtual time over which what steps come to is added up.
SLICE_SECONDS = 60.0
MICROSECONDS = 1e6


class Served(NamedTuple):
    """A request that has ended. Times are in seconds: from its ``arrival`` ``queue`` until it is
    first scheduled, ``ttft`` until its first token, ``total`` until its last; ``alone`` is the
    total that it would take with the machine to itself.
    """

    user: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    arrival: float
    queue: float
    ttft: float
    total: float
    alone: float


@dataclass(slots=True)
class Slice:
    """Sums over the steps that began within some time.

    ``row_seconds`` and ``waiting_seconds`` are rows and waiting sequences times how long the steps
    took, ``held`` and ``padded`` columns of the decode batch in each step.
    """

    seconds: float = 0.0
    row_seconds: float = 0.0
    waiting_seconds: float = 0.0
    held: int = 0
    padded: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0

    def add(self, other: Slice) -> None:
        """Adds another one's sums."""
        for name in Slice.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Measurements:
    """Of a whole run, which took ``seconds``. ``gaps`` counts tokens by the time since the one
    before, in microseconds; ``slices`` are by their number from the beginning.
    """

    submitted: int = 0
    refused: int = 0
    steps: int = 0
    seconds: float = 0.0
    most_rows: int = 0
    most_waiting: int = 0
    served: list[Served] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    slices: dict[int, Slice] = field(default_factory=dict)

    def add_gaps(self, seconds: float, tokens: int) -> None:
        """So many tokens came ``seconds`` after the one before of the same row."""
        if tokens:
            self.gaps[round(seconds * MICROSECONDS)] += tokens

    def add_step(self, clock: float, seconds: float, plan: Plan, waiting: int) -> None:
        """A step was launched at ``clock``, while so many sequences wait."""
        number = int(clock // SLICE_SECONDS)
        part = self.slices.get(number)
        if part is None:
            part = self.slices[number] = Slice()
        rows = len(plan.decode)
        held = sum(plan.capacities[band].columns for band in plan.decode.values())
        part.seconds += seconds
        part.row_seconds += rows * seconds
        part.waiting_seconds += waiting * seconds
        part.held += held
        part.padded += held - plan.work.context
        part.prefill_tokens += plan.prefill_tokens
        part.decode_tokens += rows
        part.preemptions += len(plan.preempted)
        self.steps += 1
        self.most_rows = max(self.most_rows, rows)
        self.most_waiting = max(self.most_waiting, waiting)
