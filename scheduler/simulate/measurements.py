"""The measurements that a simulation records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.scheduler.plan import Plan

# The sums of steps are kept for slices of this much simulated time.
SLICE_SECONDS = 60.0
MICROSECONDS = 1e6


class Served(NamedTuple):
    """A request that has ended. Times are in seconds.

    Attributes:
        user: the user that sent it.
        priority: its class.
        prompt_tokens: length of its prompt.
        output_tokens: length of its output.
        arrival: when it arrived.
        queue: from arrival until it was first scheduled.
        ttft: from arrival to its first token.
        total: from arrival to its last token.
        alone: the total if it had the machine to itself.
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
    """Sums over the steps that began in one slice of time.

    Attributes:
        seconds: duration of the steps.
        row_seconds: rows times the duration of each step.
        waiting_seconds: waiting sequences times the duration of each step.
        columns: columns of the decode batch's rows in each step.
        padding: the part of them without a token.
        prefill_tokens: prompt tokens.
        decode_tokens: output tokens.
        preemptions: preempted sequences.
    """

    seconds: float = 0.0
    row_seconds: float = 0.0
    waiting_seconds: float = 0.0
    columns: int = 0
    padding: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0

    def add(self, other: Slice) -> None:
        """Adds the sums of another slice."""
        for name in Slice.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Measurements:
    """The measurements of one run.

    Attributes:
        submitted: accepted requests.
        refused: requests that can never fit.
        steps: steps so far.
        seconds: duration of the run.
        max_rows: the most rows of any step.
        max_waiting: the most waiting sequences at any step.
        served: the requests that have ended.
        gaps: the number of tokens by the time since the token before, in microseconds.
        slices: sums over time; the key is the number of the slice from the beginning.
    """

    submitted: int = 0
    refused: int = 0
    steps: int = 0
    seconds: float = 0.0
    max_rows: int = 0
    max_waiting: int = 0
    served: list[Served] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    slices: dict[int, Slice] = field(default_factory=dict)

    def add_gaps(self, seconds: float, tokens: int) -> None:
        """Counts tokens that came ``seconds`` after the token before in the same row."""
        if tokens:
            self.gaps[round(seconds * MICROSECONDS)] += tokens

    def add_step(
        self, clock: float, seconds: float, plan: Plan, columns: int, waiting: int
    ) -> None:
        """Counts a step that was launched at ``clock`` while ``waiting`` sequences waited.

        Its rows hold ``columns`` columns with padding.
        """
        number = int(clock // SLICE_SECONDS)
        part = self.slices.get(number)
        if part is None:
            part = self.slices[number] = Slice()
        rows = len(plan.decode)
        part.seconds += seconds
        part.row_seconds += rows * seconds
        part.waiting_seconds += waiting * seconds
        part.columns += columns
        part.padding += columns - plan.work.context
        part.prefill_tokens += plan.prefill_tokens
        part.decode_tokens += rows
        part.preemptions += len(plan.preempted)
        self.steps += 1
        self.max_rows = max(self.max_rows, rows)
        self.max_waiting = max(self.max_waiting, waiting)
