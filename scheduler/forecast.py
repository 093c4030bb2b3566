"""How long a request would wait: what is ahead of it, by the rates that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Rates are those of about so many seconds of steps.
MEMORY_SECONDS = 30.0
# What a request used of the output that it could have had counts so much less with each that ends.
FADE = 1 - 1 / 64


@dataclass(slots=True)
class _Sum:
    """Seconds, and what was computed in them; older ones count less and less."""

    seconds: float = 0.0
    prompt: float = 0.0
    output: float = 0.0

    def add(self, prompt: int, output: int, seconds: float) -> None:
        fade = math.exp(-seconds / MEMORY_SECONDS)
        self.seconds = self.seconds * fade + seconds
        self.prompt = self.prompt * fade + prompt
        self.output = self.output * fade + output


class Rates:
    """What a prompt token and an output token take, told apart by steps without prompts."""

    def __init__(self) -> None:
        self._alone = _Sum()
        self._mixed = _Sum()

    def learn(self, prompt: int, output: int, seconds: float) -> None:
        """A step computed so many tokens of prompts, and so many rows gained one."""
        (self._mixed if prompt else self._alone).add(prompt, output, seconds)

    def seconds(self, prompt: float, output: float) -> float:
        """What so many tokens will take; 0 while nothing is known."""
        alone, mixed = self._alone, self._mixed
        each = []
        if alone.output:
            each.append(alone.seconds / alone.output)
        if mixed.output:
            # Beside prompts more rows may have run than without; a row cannot have taken more.
            both = mixed.prompt + mixed.output
            each.append(mixed.seconds / (mixed.output if each else both))
        per_output = min(each, default=0.0)
        rest = max(0.0, mixed.seconds - per_output * mixed.output)
        per_prompt = rest / mixed.prompt if mixed.prompt else 0.0
        return prompt * per_prompt + output * per_output


@dataclass(slots=True)
class _Backlog:
    """Some requests, in the order in which they came, and what they have left in all."""

    claims: dict[Claim, None] = field(default_factory=dict)
    prompt: int = 0
    output: int = 0


@dataclass(slots=True, eq=False)
class Claim:
    """An unfinished request: tokens of its prompt, and of its output at most, that are left."""

    priority: int
    arrival: float
    prompt: int
    output: int
    _place: _Backlog

    def spend(self, tokens: int) -> None:
        """So many tokens of output are not left any more: there, or not wanted."""
        self.output -= tokens
        self._place.output -= tokens

    def move(self, place: _Backlog) -> None:
        """Counts it elsewhere."""
        del self._place.claims[self]
        self._place.prompt -= self.prompt
        self._place.output -= self.output
        place.claims[self] = None
        place.prompt += self.prompt
        place.output += self.output
        self._place = place


class Forecast:
    """All unfinished requests by class, and what they take. Times are in seconds."""

    def __init__(self) -> None:
        self.rates = Rates()
        self._running = _Backlog()
        self._waiting: dict[int, _Backlog] = {}
        # Of requests that have ended: tokens of output, and how many they could have had.
        self._output = self._most = 0.0

    def add(self, priority: int, arrival: float, prompt: int, output: int) -> Claim:
        """Counts a request that has been accepted."""
        place = self._waiting.setdefault(priority, _Backlog())
        claim = Claim(priority, arrival, prompt, output, place)
        place.claims[claim] = None
        place.prompt += prompt
        place.output += output
        return claim

    def begin(self, claim: Claim) -> None:
        """Its prompt is computed: from now on it is ahead of everybody who comes."""
        claim.move(self._running)
        self._running.prompt -= claim.prompt
        claim.prompt = 0
        self._tidy(claim.priority)

    def remove(self, claim: Claim) -> None:
        """It has ended."""
        claim.move(_Backlog())
        self._tidy(claim.priority)

    def used(self, output: int, most: int) -> None:
        """Some output has ended with so many tokens; it could have had ``most``."""
        self._output = self._output * FADE + output
        self._most = self._most * FADE + most

    def wait(self, priority: int, now: float, ageing: float) -> float:
        """Seconds until all is done that is due before a request of this class that comes now.

        Of the output that others may have, as much is expected as those used that have ended.
        Looked at one by one are only those of lower classes that are due before it.
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
        used = self._output / self._most if self._most else 1.0
        return self.rates.seconds(prompt, output * used)

    def _tidy(self, priority: int) -> None:
        backlog = self._waiting.get(priority)
        if backlog is not None and not backlog.claims:
            del self._waiting[priority]
