"""Runs the engine's step loop with the real scheduler on a simulated clock, without a model.

As in ``engine/core/core.py``, a step is planned while the one before runs, and its tokens are read
after the next step is launched. A ``StepCost`` says how long each step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from chairlift.cache.capacity import Capacity
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, NO_WORK, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.simulate.budget import Budget
from chairlift.scheduler.simulate.machine import StepCost
from chairlift.scheduler.simulate.measurements import Measurements, Served
from chairlift.scheduler.simulate.trace import TraceRequest

# Every prompt and output consists of this token: only lengths matter to the scheduler.
TOKEN = 0


@dataclass(slots=True)
class RunningStep:
    """A launched step and its duration in seconds."""

    plan: Plan = field(default_factory=Plan)
    seconds: float = 0.0


class Simulation:
    """Serves requests with a scheduler, and checks in every step that it keeps its limits.

    Args:
        limits: the scheduler's limits.
        cost: the time of steps. The scheduler does not get it, but learns from the steps.
        factors: a factor for the time of each step; None: 1.
    """

    def __init__(
        self, limits: Limits, cost: StepCost, factors: Iterable[float] | None = None
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.budget = Budget(limits)
        self.measurements = Measurements()
        # When the running step began, in seconds.
        self.clock = 0.0
        self._cost = cost
        self._factors = iter(repeat(1.0) if factors is None else factors)
        self._longest = limits.max_context
        self._capacities: tuple[Capacity, ...] = (NO_CAPACITY,) * limits.bands
        self._running = RunningStep()
        self._requests: dict[Sequence, TraceRequest] = {}
        # The tokens, prompt and output, at which each sequence ends.
        self._total_tokens: dict[Sequence, int] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is left to compute."""
        return not self._requests and not self._running.seconds

    def run(self, requests: Iterable[TraceRequest]) -> Iterator[int]:
        """Serves requests, which must be in order of arrival.

        Yields:
            After each step, how many requests have ended or were refused since the one before.

        Raises:
            AssertionError: the scheduler exceeded a limit.
        """
        arrivals = iter(requests)
        upcoming = next(arrivals, None)
        while upcoming or not self.idle:
            done = 0
            if upcoming and self.idle:
                self.clock = max(self.clock, upcoming.arrival)
            while upcoming and upcoming.arrival <= self.clock:
                done += not self.submit(upcoming)
                upcoming = next(arrivals, None)
            yield done + self.step()
        self.measurements.seconds = self.clock

    def submit(self, request: TraceRequest) -> bool:
        """Queues a request. Returns False if it can never fit."""
        if request.prompt_tokens + request.max_tokens > self._longest:
            self.measurements.refused += 1
            return False
        self.measurements.submitted += 1
        sequence = Sequence(
            str(self.measurements.submitted),
            [TOKEN] * request.prompt_tokens,
            request.max_tokens,
            arrival=request.arrival,
            priority=request.priority,
        )
        self._requests[sequence] = request
        self._total_tokens[sequence] = request.prompt_tokens + request.output_tokens
        self.scheduler.add(sequence)
        return True

    def step(self) -> int:
        """Plans and launches a step, and reads the one before. Returns how many requests ended."""
        plan = self.scheduler.plan(self._capacities)
        for sequence in plan.cached:
            if sequence.scheduled_at is None:
                sequence.scheduled_at = self.clock
        self._wait()
        self.budget.launch(plan)
        preempted = [sequence for sequence in plan.preempted if sequence.in_flight]
        self.scheduler.commit(plan)
        self._capacities = plan.capacities
        ended = self._read(self._running)
        for sequence in preempted:
            sequence.last_token_at = self.clock
        self._running = RunningStep(plan, self._seconds(plan))
        waiting = len(self.scheduler.waiting)
        self.measurements.add_step(
            self.clock, self._running.seconds, plan, self.budget.columns, waiting
        )
        return ended

    def _wait(self) -> None:
        """Moves the clock to the end of the running step; the scheduler learns its duration."""
        self.clock += self._running.seconds
        if self._running.seconds:
            self.scheduler.learn(self._running.plan.work, self._running.seconds)

    def _seconds(self, plan: Plan) -> float:
        if plan.work == NO_WORK:
            return 0.0
        return self._cost.seconds(plan.work) * next(self._factors)

    def _read(self, step: RunningStep) -> int:
        """Reads the tokens of a step that has run. Returns how many requests ended."""
        read_tokens, total_tokens = self.scheduler.read, self._total_tokens
        ended, read = [], 0
        for sequence in step.plan.decode:
            if not sequence.finished:
                read += 1
                read_tokens(sequence, [TOKEN])
                if len(sequence.tokens) == total_tokens[sequence]:
                    ended.append(sequence)
        # A sequence in ``decode`` gained a token in the step before as well.
        self.measurements.add_gaps(step.seconds, read)
        for sequence in step.plan.joins:
            read_tokens(sequence, [TOKEN])
            if sequence.first_token_at is None:
                sequence.first_token_at = self.clock
            elif sequence.last_token_at is not None:
                self.measurements.add_gaps(self.clock - sequence.last_token_at, 1)
            if len(sequence.tokens) == total_tokens[sequence]:
                ended.append(sequence)
        for sequence in ended:
            self._finish(sequence)
        return len(ended)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._total_tokens[sequence]
        request = self._requests.pop(sequence)
        assert sequence.scheduled_at is not None
        assert sequence.first_token_at is not None
        # Without other rows only the limit of tokens cuts a prompt into chunks.
        chunk = self.scheduler.limits.max_step_tokens
        alone = self._cost.seconds_alone(request.prompt_tokens, request.output_tokens, chunk)
        self.measurements.served.append(
            Served(
                request.user,
                request.priority,
                request.prompt_tokens,
                len(sequence.tokens) - sequence.prompt_tokens,
                sequence.arrival,
                sequence.scheduled_at - sequence.arrival,
                sequence.first_token_at - sequence.arrival,
                self.clock - sequence.arrival,
                alone,
            )
        )
