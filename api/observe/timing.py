"""When what happened to a prompt: the engine's times, and those of the API process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from chairlift.engine.messages import PrefillTimes, TokenOutput


@dataclass(slots=True)
class PromptTimes:
    """A prompt's way, in seconds of ``time.monotonic()``; None is a point that was not reached.

    ``last_token`` is when the API process had the last token of its choices so far.
    """

    arrival: float
    begun: PrefillTimes | None = None
    last_token: float | None = None

    def take(self, output: TokenOutput, now: float) -> None:
        """Notes an output that has arrived."""
        # An engine that is started anew tells it again.
        self.begun = self.begun or output.begun
        self.last_token = now

    @property
    def queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.begun is None else self.begun.scheduled - self.arrival

    @property
    def prefill(self) -> float | None:
        """Seconds from the first step to the first token."""
        return None if self.begun is None else self.begun.first_token - self.begun.scheduled

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last."""
        if self.begun is None or self.last_token is None:
            return None
        return self.last_token - self.begun.first_token


@dataclass(slots=True)
class Detokenizing:
    """From the first tokens turned into text to the last; ``busy`` are the seconds it took."""

    started: float | None = None
    ended: float = 0.0
    busy: float = 0.0

    def add(self, started: float) -> None:
        """One step's tokens, begun at ``started``, are text now."""
        self.ended = time.monotonic()
        self.busy += self.ended - started
        if self.started is None:
            self.started = started
