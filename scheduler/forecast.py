"""Forecasts how long a new request would wait: the work ahead of it, at the measured rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Rates are averaged over about this many seconds of steps.
MEMORY_SECONDS = 30.0
# Weight of the outputs before, at each output that ends: the average is over about 64 of them.
FADE = 1 - 1 / 64


@dataclass(slots=True)
class _Average:
    """Sums of seconds and computed tokens that decay exponentially with time."""

    seconds: float = 0.0
    prompt: float = 0.0
    output: float = 0.0

    def add(self, prompt: int, output: int, seconds: float) -> None:
        fade = math.exp(-seconds / MEMORY_SECONDS)
        self.seconds = self.seconds * fade + seconds
        self.prompt = self.prompt * fade + prompt
        self.output = self.output * fade + output


class Rates:
    """Seconds of a prompt token and of an output token; steps without prompts tell them apart."""

    def __init__(self) -> None:
        self._decode_only = _Average()
        self._mixed = _Average()

    def learn(self, prompt: int, output: int, seconds: float) -> None:
        """Learns from a step of ``seconds`` with these numbers of prompt and output tokens."""
        (self._mixed if prompt else self._decode_only).add(prompt, output, seconds)

    def seconds(self, prompt: float, output: float) -> float:
        """The predicted seconds of these numbers of tokens; 0 before any step was learned."""
        decode_only, mixed = self._decode_only, self._mixed
        bounds = []
        if decode_only.output:
            bounds.append(decode_only.seconds / decode_only.output)
        if mixed.output:
            # Mixed steps may have had more rows, so that each took less: their whole time per row
            # is an upper bound.
            both = mixed.prompt + mixed.output
            bounds.append(mixed.seconds / (mixed.output if bounds else both))
        per_output = min(bounds, default=0.0)
        rest = max(0.0, mixed.seconds - per_output * mixed.output)
        per_prompt = rest / mixed.prompt if mixed.prompt else 0.0
        return prompt * per_prompt + output * per_output


@dataclass(slots=True)
class _Backlog:
    """Requests in order of arrival, and the sums of their remaining tokens."""

    claims: dict[Claim, None] = field(default_factory=dict)
    prompt: int = 0
    output: int = 0


@dataclass(slots=True, eq=False)
class Claim:
    """An unfinished request's remaining work.

    Attributes:
        priority: the request's class.
        arrival: when it arrived, in seconds.
        prompt: prompt tokens that remain.
        output: maximum output tokens that remain.
    """

    priority: int
    arrival: float
    prompt: int
    output: int
    _backlog: _Backlog

    def spend(self, tokens: int) -> None:
        """Subtracts output tokens that were computed, or that will not be."""
        self.output -= tokens
        self._backlog.output -= tokens

    def move(self, backlog: _Backlog) -> None:
        """Moves the claim to another backlog."""
        del self._backlog.claims[self]
        self._backlog.prompt -= self.prompt
        self._backlog.output -= self.output
        backlog.claims[self] = None
        backlog.prompt += self.prompt
        backlog.output += self.output
        self._backlog = backlog


class Forecast:
    """The remaining work of all unfinished requests by class. Times are in seconds."""

    def __init__(self) -> None:
        self.rates = Rates()
        self._running = _Backlog()
        self._waiting: dict[int, _Backlog] = {}
        # Decaying sums over the outputs that have ended: their tokens, and their maximum tokens.
        self._output = self._max_output = 0.0

    def add(self, priority: int, arrival: float, prompt: int, output: int) -> Claim:
        """Adds an accepted request with its prompt tokens and maximum output tokens."""
        backlog = self._waiting.setdefault(priority, _Backlog())
        claim = Claim(priority, arrival, prompt, output, backlog)
        backlog.claims[claim] = None
        backlog.prompt += prompt
        backlog.output += output
        return claim

    def begin(self, claim: Claim) -> None:
        """Marks a request's prompt as computed: it is now ahead of every new request."""
        claim.move(self._running)
        self._running.prompt -= claim.prompt
        claim.prompt = 0
        self._tidy(claim.priority)

    def remove(self, claim: Claim) -> None:
        """Removes a request that has ended."""
        claim.move(_Backlog())
        self._tidy(claim.priority)

    def learn_output(self, output: int, max_output: int) -> None:
        """Learns from an output that has ended which part of its maximum outputs use."""
        self._output = self._output * FADE + output
        self._max_output = self._max_output * FADE + max_output

    def waiting_prompt(self, priority: int) -> int:
        """Prompt tokens of this class and more urgent ones that are not computed yet."""
        return sum(backlog.prompt for other, backlog in self._waiting.items() if other <= priority)

    @property
    def expected_output(self) -> float:
        """Output tokens that all unfinished requests are expected to have yet."""
        waiting = sum(backlog.output for backlog in self._waiting.values())
        return (self._running.output + waiting) * self.used_part

    @property
    def used_part(self) -> float:
        """The part of their maximum tokens that outputs use; 1 before the first output ended."""
        return self._output / self._max_output if self._max_output else 1.0

    def wait(self, priority: int, now: float, ageing: float) -> float:
        """Seconds until all work is done that is ahead of a request of ``priority`` arriving now.

        Remaining outputs are expected to use the same part of their maximum as those that have
        ended. Only requests with a higher number as priority that are due earlier are looked at
        one by one; the others are summed already.

        Args:
            priority: the class of the new request.
            now: its time of arrival.
            ageing: seconds by which one level of priority delays a request.
        """
        prompt, output = self._running.prompt, self._running.output
        for other, backlog in self._waiting.items():
            if other <= priority:
                prompt += backlog.prompt
                output += backlog.output
                continue
            for claim in backlog.claims:
                if claim.arrival + other * ageing > now + priority * ageing:
                    break
                prompt += claim.prompt
                output += claim.output
        return self.rates.seconds(prompt, output * self.used_part)

    def _tidy(self, priority: int) -> None:
        backlog = self._waiting.get(priority)
        if backlog is not None and not backlog.claims:
            del self._waiting[priority]
