"""Times of a prompt's phases, measured in the engine and in the API process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from chairlift.engine.messages import PrefillTimes, TokenOutput


@dataclass(slots=True)
class PromptTimes:
    """Times of one prompt, in seconds of ``time.monotonic()``; None means not reached yet.

    Attributes:
        arrival: when the request arrived.
        prefill_times: the times that the engine reports.
        last_token: when the API process received the latest token of the prompt's choices.
    """

    arrival: float
    prefill_times: PrefillTimes | None = None
    last_token: float | None = None

    def take(self, output: TokenOutput, now: float) -> None:
        """Records the arrival of an output."""
        # A restarted engine reports the prefill again; the first report counts.
        self.prefill_times = self.prefill_times or output.prefill_times
        self.last_token = now

    @property
    def queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.prefill_times is None else self.prefill_times.scheduled - self.arrival

    @property
    def prefill(self) -> float | None:
        """Seconds from the first step to the first token."""
        times = self.prefill_times
        return None if times is None else times.first_token - times.scheduled

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last."""
        if self.prefill_times is None or self.last_token is None:
            return None
        return self.last_token - self.prefill_times.first_token


@dataclass(slots=True)
class Detokenizing:
    """The time span in which a request's output was detokenized.

    Attributes:
        started: its begin in ``time.monotonic()`` seconds, or None.
        ended: its end.
        busy: the seconds of it that were spent detokenizing.
    """

    started: float | None = None
    ended: float = 0.0
    busy: float = 0.0

    def add(self, started: float) -> None:
        """Adds one step's detokenizing, which began at ``started`` and ends now."""
        self.ended = time.monotonic()
        self.busy += self.ended - started
        if self.started is None:
            self.started = started
