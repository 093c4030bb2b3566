"""The engine's steps on a clock of their own: the real scheduler, and no model.

As in ``engine/core/core.py`` a step is planned while the one before runs, whose tokens are read
once the next is launched. How long a step takes, a cost line says instead of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from chairlift.cache.capacity import Capacity
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import NO_WORK, NOTHING, Plan, Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.simulate.budget import Budget
from chairlift.scheduler.simulate.machine import StepCost
from chairlift.scheduler.simulate.measurements import Measurements, Served
from chairlift.scheduler.simulate.trace import Request

# What every prompt and every output consists of: the scheduler minds lengths only.
TOKEN = 0


@dataclass(slots=True)
class RunningStep:
    """A step that was launched, and the seconds that it takes."""

    plan: Plan = field(default_factory=Plan)
    seconds: float = 0.0


class Simulation:
    """Serves requests by a scheduler, and sees in every step that it keeps to its limits.

    Args:
        cost: what steps take; the scheduler is not told, but learns it.
        factors: by what each step takes longer than that.
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
        self._capacities: tuple[Capacity, ...] = (NOTHING,) * limits.bands
        self._running = RunningStep()
        self._requests: dict[Sequence, Request] = {}
        # Of each of them, how many tokens it has when it ends.
        self._ends: dict[Sequence, int] = {}

    @property
    def idle(self) -> bool:
        """Nothing is left to compute."""
        return not self._requests and not self._running.seconds

    def run(self, requests: Iterable[Request]) -> Iterator[int]:
        """Serves requests, which are in the order in which they arrive.

        Yields:
            After each step, how many requests have ended or were refused since the one before.

        Raises:
            AssertionError: the scheduler went beyond its limits.
        """
        arrivals = iter(requests)
        coming = next(arrivals, None)
        while coming or not self.idle:
            done = 0
            if coming and self.idle:
                self.clock = max(self.clock, coming.arrival)
            while coming and coming.arrival <= self.clock:
                done += not self.submit(coming)
                coming = next(arrivals, None)
            yield done + self.step()
        self.measurements.seconds = self.clock

    def submit(self, request: Request) -> bool:
        """Queues a request; whether it can ever fit."""
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
        self._ends[sequence] = request.prompt_tokens + request.output_tokens
        self.scheduler.add(sequence)
        return True

    def step(self) -> int:
        """Plans and launches a step, and reads the one before; how many requests that ended."""
        plan = self.scheduler.plan(self._capacities)
        for sequence in plan.cached:
            if sequence.scheduled_at is None:
                sequence.scheduled_at = self.clock
        self._wait()
        self.budget.launch(plan)
        taken_out = [sequence for sequence in plan.preempted if sequence.in_flight]
        self.scheduler.commit(plan)
        self._capacities = plan.capacities
        ended = self._read(self._running)
        for sequence in taken_out:
            sequence.last_token_at = self.clock
        self._running = RunningStep(plan, self._seconds(plan))
        waiting = len(self.scheduler.waiting)
        self.measurements.add_step(self.clock, self._running.seconds, plan, waiting)
        return ended

    def _wait(self) -> None:
        """Until the running step is there. The scheduler learns what it took."""
        self.clock += self._running.seconds
        if self._running.seconds:
            self.scheduler.learn(self._running.plan.work, self._running.seconds)

    def _seconds(self, plan: Plan) -> float:
        if plan.work == NO_WORK:
            return 0.0
        return self._cost.seconds(plan.work) * next(self._factors)

    def _read(self, step: RunningStep) -> int:
        """Each row of a step that has run gains its token; how many requests end with theirs."""
        token, ends = self.scheduler.token, self._ends
        ended, read = [], 0
        for sequence in step.plan.decode:
            if not sequence.finished:
                read += 1
                token(sequence, TOKEN)
                if len(sequence.tokens) == ends[sequence]:
                    ended.append(sequence)
        # Whoever is in ``decode`` gained a token in the step before as well.
        self.measurements.add_gaps(step.seconds, read)
        for sequence in step.plan.joins:
            token(sequence, TOKEN)
            if sequence.first_token_at is None:
                sequence.first_token_at = self.clock
            elif sequence.last_token_at is not None:
                self.measurements.add_gaps(self.clock - sequence.last_token_at, 1)
            if len(sequence.tokens) == ends[sequence]:
                ended.append(sequence)
        for sequence in ended:
            self._finish(sequence)
        return len(ended)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._ends[sequence]
        request = self._requests.pop(sequence)
        assert sequence.scheduled_at is not None
        assert sequence.first_token_at is not None
        # Alone a prompt is cut by tokens only.
        chunk = self.scheduler.limits.max_step_tokens
        alone = self._cost.alone(request.prompt_tokens, request.output_tokens, chunk)
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
